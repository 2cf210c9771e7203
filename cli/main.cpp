// The program deltic.
#include <csignal>

#include "commands.h"

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);  // a reader that is gone is an error in words
  return deltic::cli::run_program(argc, argv, false);
}
