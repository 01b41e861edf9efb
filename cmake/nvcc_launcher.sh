#!/bin/sh
# CMake's launcher for nvcc: nvcc_launcher.sh [CCACHE] NVCC ARGUMENTS, in the build directory.
#
# -lineinfo records where each source lay, as an absolute path. Sources below the build directory are
# named through /proc/self/cwd instead (Library.cmake links csrc and the toolkit's headers there), so
# that no path of this machine gets into the library, and so that `ncu --import-source yes`, started
# from the repository, finds csrc.
for argument; do
  shift
  case $argument in "$PWD"/*.cu) argument=/proc/self/cwd${argument#"$PWD"} ;; esac
  set -- "$@" "$argument"
done
log=$("$@" 2>&1)
status=$?
[ -z "$log" ] || printf '%s\n' "$log"
# ptxas only informs of this, and no flag makes it more: asynchronous products wait for one another.
case $log in *"wgmma.mma_async instructions are serialized"*)
  echo "ikbo: ptxas serialised wgmma (see above), an error in this build." >&2
  status=1 ;;
esac
exit $status
