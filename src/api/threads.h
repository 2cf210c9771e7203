// How many threads a call gets.
#pragma once

namespace deltic {

bool is_forked_child();  // where one thread must do

// At most `wanted`, at least 1: as many as this thread's parallel regions can have. OpenMP ends the
// process if it cannot create a thread, so they are tried when a thread first asks for so many.
int threads_to_be_had(int wanted);

}  // namespace deltic
