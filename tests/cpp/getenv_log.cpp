// LD_PRELOADed: writes to stderr every environment variable that libikbo.so reads.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

extern "C" char* getenv(const char* name) {
  using Getenv = char* (*)(const char*);
  static const Getenv real = reinterpret_cast<Getenv>(dlsym(RTLD_NEXT, "getenv"));
  Dl_info caller;
  if (dladdr(__builtin_return_address(0), &caller) && std::strstr(caller.dli_fname, "libikbo")) {
    std::fprintf(stderr, "libikbo.so reads %s\n", name);
  }
  return real(name);
}
