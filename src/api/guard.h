// The C ABI's fence: exceptions become status codes and a thread-local text.
#pragma once

#include <new>

#include "core/error.h"
#include "deltic/deltic.h"

namespace deltic {

void set_last_error(const char* text) noexcept;

template <class Body>
deltic_status guard(const Body& body) noexcept {
  try {
    body();
    return DELTIC_OK;
  } catch (const Failure& e) {
    set_last_error(e.what());
    return e.status();
  } catch (const std::bad_alloc&) {
    set_last_error("out of memory");
    return DELTIC_OUT_OF_MEMORY;
  } catch (const std::exception& e) {
    set_last_error(e.what());
    return DELTIC_RUNTIME_ERROR;
  } catch (...) {
    set_last_error("unknown failure");
    return DELTIC_RUNTIME_ERROR;
  }
}

}  // namespace deltic
