# Target torch_stable: LibTorch's stable ABI and nothing else of torch. find_package(Torch) is
# avoided on purpose: it demands a CUDA toolkit that matches torch's and adds flags of its own.
if(NOT IKBO_TORCH_DIR)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import importlib.util
spec = importlib.util.find_spec('torch')
print(spec.submodule_search_locations[0] if spec else '', end='')"
    OUTPUT_VARIABLE IKBO_TORCH_DIR)
endif()
if(NOT EXISTS "${IKBO_TORCH_DIR}/include/torch/csrc/stable/library.h")
  message(FATAL_ERROR
    "ikbo: no torch >= 2.11 headers found (looked in '${IKBO_TORCH_DIR}'). To fix: "
    "pip install -r requirements/build.txt; the CPU-only build of torch is enough.")
endif()
message(STATUS "torch: ${IKBO_TORCH_DIR}")

# For the C++ files alone: the kernels know no torch. 2.11 is the oldest torch the library loads under;
# USE_CUDA makes the shim header declare the stream getter, which launch/stream.cpp declares weak.
add_library(torch_stable INTERFACE)
target_include_directories(torch_stable SYSTEM INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:${IKBO_TORCH_DIR}/include>)
target_compile_definitions(torch_stable INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:TORCH_TARGET_VERSION=0x020b000000000000;USE_CUDA>)
# Static initialisers register the ops: the loader must bring torch's libraries in even where the
# linker sees no direct call.
target_link_options(torch_stable INTERFACE -Wl,--no-as-needed)
target_link_libraries(torch_stable INTERFACE
  "${IKBO_TORCH_DIR}/lib/libtorch.so" "${IKBO_TORCH_DIR}/lib/libtorch_cpu.so")
