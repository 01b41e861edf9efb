# libikbo_device_tests.so, in the build directory: small kernels that use the primitives of csrc/hopper
# one at a time, for tests/test_device.py. Built only when asked for:
#   cmake --build build/cmake --target ikbo_device_tests
file(GLOB IKBO_DEVICE_TESTS CONFIGURE_DEPENDS RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}"
  tests/device/*.cu)
if(NOT IKBO_DEVICE_TESTS)
  return()  # a source distribution
endif()
file(CREATE_LINK "${CMAKE_CURRENT_SOURCE_DIR}/tests" "${CMAKE_BINARY_DIR}/tests" SYMBOLIC)
list(TRANSFORM IKBO_DEVICE_TESTS PREPEND "${CMAKE_BINARY_DIR}/")
set_source_files_properties(${IKBO_DEVICE_TESTS} PROPERTIES
  OBJECT_DEPENDS "${IKBO_WGMMA_INSTRUCTIONS}")
add_library(ikbo_device_tests SHARED EXCLUDE_FROM_ALL
  ${IKBO_DEVICE_TESTS} csrc/launch/error.cpp csrc/launch/tensor_map.cpp)
target_include_directories(ikbo_device_tests PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:${CMAKE_CURRENT_SOURCE_DIR}/csrc>)
target_include_directories(ikbo_device_tests SYSTEM PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}>)
target_compile_options(ikbo_device_tests PRIVATE
  "$<$<COMPILE_LANGUAGE:CUDA>:${IKBO_CUDA_OPTIONS}>")
set_target_properties(ikbo_device_tests PROPERTIES
  CUDA_ARCHITECTURES 90a-real
  CUDA_RUNTIME_LIBRARY Static
  CUDA_VISIBILITY_PRESET default
  LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}")
