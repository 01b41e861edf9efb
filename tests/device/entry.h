// What the launchers of the device tests share.
#pragma once

#include <exception>
#include <string>

#include "launch/launch.h"

#define IKBO_TEST_ENTRY extern "C" const char*

namespace ikbo {

// Runs a launcher's body. Exceptions don't cross into C: returns null, or what went wrong.
template <class Body>
const char* entry(Body body) {
  static thread_local std::string error;
  try {
    body();
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}

}  // namespace ikbo
