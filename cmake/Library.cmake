# libikbo.so: the op layer in C++, the kernels in CUDA.
include(cmake/FindNvcc.cmake)     # sets CMAKE_CUDA_COMPILER before the language is enabled
include(cmake/TorchStable.cmake)  # target torch_stable: headers and libraries of the installed torch
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)

# The launcher says what these links are for.
list(GET CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES 0 IKBO_CUDA_INCLUDE)
file(CREATE_LINK "${CMAKE_CURRENT_SOURCE_DIR}/csrc" "${CMAKE_BINARY_DIR}/csrc" SYMBOLIC)
file(CREATE_LINK "${IKBO_CUDA_INCLUDE}" "${CMAKE_BINARY_DIR}/cuda" SYMBOLIC)
set(CMAKE_CUDA_COMPILER_LAUNCHER
  "${CMAKE_CURRENT_SOURCE_DIR}/cmake/nvcc_launcher.sh" ${CMAKE_CXX_COMPILER_LAUNCHER})

# hopper/wgmma.cuh includes it, as generated/wgmma_instructions.cuh.
set(IKBO_WGMMA_INSTRUCTIONS "${CMAKE_BINARY_DIR}/include/generated/wgmma_instructions.cuh")
add_custom_command(
  OUTPUT "${IKBO_WGMMA_INSTRUCTIONS}"
  COMMAND ${Python_EXECUTABLE} "${CMAKE_CURRENT_SOURCE_DIR}/cmake/generate_wgmma.py"
    "${IKBO_WGMMA_INSTRUCTIONS}"
  DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/cmake/generate_wgmma.py"
  COMMENT "Writing the wgmma instructions"
  VERBATIM)

file(GLOB IKBO_CXX_SOURCES CONFIGURE_DEPENDS csrc/ops/*.cpp csrc/launch/*.cpp csrc/kernels/*/*.cpp)
file(GLOB IKBO_CUDA_SOURCES CONFIGURE_DEPENDS RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}"
  csrc/kernels/*/*.cu csrc/kernels/*/instantiations/*.cu)
list(TRANSFORM IKBO_CUDA_SOURCES PREPEND "${CMAKE_BINARY_DIR}/")
set_source_files_properties(${IKBO_CUDA_SOURCES} PROPERTIES
  OBJECT_DEPENDS "${IKBO_WGMMA_INSTRUCTIONS}")
add_library(ikbo SHARED ${IKBO_CXX_SOURCES} ${IKBO_CUDA_SOURCES})
target_include_directories(ikbo PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${CMAKE_CURRENT_SOURCE_DIR}/csrc>)
# The C++ files see the runtime headers nvcc compiles with.
target_include_directories(ikbo SYSTEM PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}>)
file(STRINGS pyproject.toml IKBO_VERSION REGEX "^version = ")
string(REGEX REPLACE "^version = \"(.*)\"$" "\\1" IKBO_VERSION "${IKBO_VERSION}")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS pyproject.toml)
set_source_files_properties(csrc/ops/c_api.cpp PROPERTIES
  COMPILE_DEFINITIONS IKBO_VERSION="${IKBO_VERSION}")
target_link_libraries(ikbo PRIVATE torch_stable)
set_target_properties(ikbo PROPERTIES
  # SASS for Hopper only: sm_90a PTX runs nowhere else, so none is shipped.
  CUDA_ARCHITECTURES 90a-real
  CUDA_RUNTIME_LIBRARY Static
  LIBRARY_OUTPUT_DIRECTORY "${IKBO_OUTPUT_DIR}"
  BUILD_WITH_INSTALL_RPATH ON
  INSTALL_RPATH ""
  LINK_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/cmake/exports.map")
# -lineinfo also embeds the PTX as text, more than half of a kernel's image, which objcopy can't
# remove. Compressed as a whole, images take a seventh, and keep their lines for Nsight Compute.
set(IKBO_CUDA_OPTIONS -lineinfo --expt-relaxed-constexpr
  -Xfatbinary=--compress-all --compress-mode=size
  -I/proc/self/cwd/csrc -I/proc/self/cwd/include
  "SHELL:-isystem /proc/self/cwd/cuda" "SHELL:-isystem /proc/self/cwd/cuda/cccl"
  -Xptxas=--warn-on-spills,--warn-on-local-memory-usage -Werror=all-warnings)
# The torch headers put their __FILE__ into error messages, hence the second map.
target_compile_options(ikbo PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror
    -ffile-prefix-map=${CMAKE_CURRENT_SOURCE_DIR}=ikbo
    -ffile-prefix-map=${IKBO_TORCH_DIR}/include/torch=torch>
  "$<$<COMPILE_LANGUAGE:CUDA>:${IKBO_CUDA_OPTIONS}>")
# exports.map hides all but the plain C functions.
target_link_options(ikbo PRIVATE
  -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/cmake/exports.map -Wl,-z,defs)

include(cmake/DeviceTests.cmake)
