// The keys of the case grammar: one table, from which parsing, printing, filters and help are made.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cases/case.h"

namespace deltic::cases {

// How a key's text and a field of the case become each other.
struct Value {
  std::string (*takes)();
  std::string (*get)(const Case&);
  void (*set)(Case&, const char* key, std::string_view text);
};

struct Key {
  const char* name;
  Value value;
  const char* default_text;
  const char* help;
  // Empty if the key applies to the case, else what it needs beside it.
  std::string (*needs)(const Case&);
};

std::span<const Key> keys();
const Key* find_key(std::string_view name);  // null if there is none

// What a line can begin with.
struct Operation {
  Op op;
  bool gradient;
};
std::span<const Operation> operations();

bool is_any(Op op, std::initializer_list<Op> ops);
[[noreturn]] void bad(std::string_view key, const std::string& expected, std::string_view got);
// Adds an item to a list in a text.
void append(std::string& list, const char* separator, std::string_view item);
std::vector<std::string> split_text(std::string_view text, char separator);

}  // namespace deltic::cases
