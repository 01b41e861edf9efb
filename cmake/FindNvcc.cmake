# nvcc from, in this order: CUDACXX or CUDA_HOME, PATH, /usr/local/cuda, the nvidia-cuda-nvcc wheel
# of the Python that runs the build. The wheels lack the lib64 folder nvcc looks in, hence the flags.
if(NOT CMAKE_CUDA_COMPILER)
  find_program(IKBO_NVCC nvcc HINTS $ENV{CUDACXX} $ENV{CUDA_HOME}/bin PATHS /usr/local/cuda/bin)
  if(NOT IKBO_NVCC)
    find_package(Python REQUIRED COMPONENTS Interpreter)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c "import importlib.util, pathlib
spec = importlib.util.find_spec('nvidia')
roots = [pathlib.Path(p) for p in spec.submodule_search_locations] if spec else []
print(next((str(r / 'cu13') for r in roots if (r / 'cu13/bin/nvcc').exists()), ''), end='')"
      OUTPUT_VARIABLE IKBO_CUDA_WHEEL)
    if(NOT IKBO_CUDA_WHEEL)
      message(FATAL_ERROR
        "ikbo: no CUDA compiler found. Expected nvcc 13.0 or newer on PATH, under CUDA_HOME or in "
        "/usr/local/cuda, or from PyPI. To fix: pip install -r requirements/nvcc.txt (100 MB, needs "
        "no GPU and no driver).")
    endif()
    set(IKBO_NVCC "${IKBO_CUDA_WHEEL}/bin/nvcc")
    set(CMAKE_CUDA_FLAGS_INIT "-L${IKBO_CUDA_WHEEL}/lib")
    set(CUDAToolkit_ROOT "${IKBO_CUDA_WHEEL}")
  endif()
  set(CMAKE_CUDA_COMPILER "${IKBO_NVCC}")
endif()
