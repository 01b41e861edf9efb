# nvcc from, in this order: CUDACXX, CUDA_HOME, the nvidia-cuda-nvcc wheel of the Python that runs
# the build (it is pinned, so it goes first where it is installed), PATH, /usr/local/cuda.
if(NOT CMAKE_CUDA_COMPILER)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import importlib.util, pathlib
spec = importlib.util.find_spec('nvidia')
roots = [pathlib.Path(p) for p in spec.submodule_search_locations] if spec else []
print(next((str(r / 'cu13') for r in roots if (r / 'cu13/bin/nvcc').exists()), ''), end='')"
    OUTPUT_VARIABLE IKBO_CUDA_WHEEL)
  if(DEFINED ENV{CUDACXX})
    set(CMAKE_CUDA_COMPILER "$ENV{CUDACXX}")
  elseif(DEFINED ENV{CUDA_HOME})
    set(CMAKE_CUDA_COMPILER "$ENV{CUDA_HOME}/bin/nvcc")
  elseif(IKBO_CUDA_WHEEL)
    foreach(piece nvvm/bin/cicc include/crt/host_config.h include/cccl/cuda/ptx
            include/cuda_runtime.h lib/libcudart_static.a)
      if(NOT EXISTS "${IKBO_CUDA_WHEEL}/${piece}")
        message(FATAL_ERROR "ikbo: nvcc from PyPI lacks ${IKBO_CUDA_WHEEL}/${piece}. To fix: "
          "pip install -r requirements/nvcc.txt")
      endif()
    endforeach()
    set(CMAKE_CUDA_COMPILER "${IKBO_CUDA_WHEEL}/bin/nvcc")
    # The wheels have lib where nvcc looks in lib64.
    set(CMAKE_CUDA_FLAGS_INIT "-L${IKBO_CUDA_WHEEL}/lib")
  else()
    find_program(IKBO_NVCC nvcc PATHS /usr/local/cuda/bin)
    if(NOT IKBO_NVCC)
      message(FATAL_ERROR
        "ikbo: no CUDA compiler found. Expected nvcc 13.0 or newer from CUDACXX, CUDA_HOME, PATH, "
        "/usr/local/cuda or PyPI. To fix: pip install -r requirements/nvcc.txt (100 MB, needs no GPU "
        "and no driver).")
    endif()
    set(CMAKE_CUDA_COMPILER "${IKBO_NVCC}")
  endif()
  execute_process(
    COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE IKBO_NVCC_VERSION ERROR_QUIET)
  string(REGEX MATCH "release ([0-9.]+)" IKBO_NVCC_VERSION "${IKBO_NVCC_VERSION}")
  if(NOT IKBO_NVCC_VERSION OR CMAKE_MATCH_1 VERSION_LESS 13.0)
    message(FATAL_ERROR "ikbo: expected nvcc 13.0 or newer, got ${CMAKE_CUDA_COMPILER} "
      "(${IKBO_NVCC_VERSION}). To fix: pip install -r requirements/nvcc.txt, and unset CUDACXX and "
      "CUDA_HOME; or point CUDACXX to another.")
  endif()
endif()
