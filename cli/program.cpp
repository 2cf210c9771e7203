// The command line of the program deltic: reads it and calls one command.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <exception>
#include <limits>
#include <new>

#include "commands.h"

namespace {

using namespace deltic::cli;

// An option with a number from low to high; any other text is an error in our words.
template <class Number>
CLI::Option* add_number(CLI::App* command, const std::string& name, Number& target, Number low,
                        Number high, const std::string& range, const std::string& help) {
  const auto read = [=, &target](const std::string& text) {
    Number x{};
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, x);
    if (error != std::errc() || stop != end || !(x >= low) || !(x <= high)) {
      throw UsageError(name + ": expected " + range + ", got '" + text + "'");
    }
    target = x;
  };
  return command->add_option_function<std::string>(name, read, help);
}

void add_common(CLI::App* command, Common& common) {
  command
      ->add_option_function<std::string>(
          "--json",
          [&common](const std::string& path) {
            if (path.empty()) throw UsageError("--json: expected a file's name or -, got ''");
            common.json = path;
          },
          "Write the result as JSON to this file; - is stdout, and text then goes to stderr")
      ->type_name("PATH");
  add_number(command, "--threads", common.threads, 1, 4096, "a whole number from 1 to 4096",
             "Threads (default: all the process may use)")
      ->type_name("N");
}

// both: where the command can run on the two, one after the other; common.device is then the GPU.
void add_device(CLI::App* command, Common& common, bool* both = nullptr) {
  const auto read = [&common, both](const std::string& text) {
    if (text != "cpu" && text != "cuda" && (both == nullptr || text != "both")) {
      throw UsageError(std::string("--device: expected cpu") +
                       (both != nullptr ? ", cuda or both" : " or cuda") + ", got '" + text + "'");
    }
    if (both != nullptr) *both = text == "both";
    common.device = text == "cpu" ? deltic::DeviceType::cpu : deltic::DeviceType::cuda;
  };
  command
      ->add_option_function<std::string>(
          "--device", read,
          both != nullptr ? "Where the tensors lie: cpu (default), cuda, or both in turn"
                          : "Where the tensors lie: cpu (default) or cuda")
      ->type_name("NAME");
}

void add_seed(CLI::App* command, long long& seed) {
  add_number(command, "--seed", seed, 0LL, std::numeric_limits<long long>::max(),
             "a whole number from 0 to 9223372036854775807",
             "Seed of every case's inputs (default: as the cases say)")
      ->type_name("N");
}

void add_filter(CLI::App* command, std::vector<std::string>& filters) {
  command
      ->add_option(
          "--filter", filters,
          "Only cases for which every blank-separated term holds: key=value, or a piece of the "
          "canonical line without =")
      ->type_name("TERMS")
      ->expected(1)
      ->take_all();
}

constexpr const char* kEnvironment =
    "Environment:\n"
    "  DELTIC_IMPL      implementations to run: NAME, or forward:NAME,backward:NAME,...\n"
    "  DELTIC_LOG       dispatch: print every decision to stderr\n"
    "  DELTIC_CHECKED   1: look for inputs that are not finite and gates beyond the contract; 0\n"
    "  OMP_NUM_THREADS  threads, unless --threads says";

// Insertions, deletions, replacements and swaps of neighbours that turn one word into the other.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      d[i][j] = std::min(
          {d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

// The error for a word that is none of `names`.
[[noreturn]] void refuse_word(const std::string& what, const std::vector<std::string>& names,
                              const std::string& word) {
  std::string all, nearest;
  size_t best = 3;  // a word with more wrong letters is another word
  for (const std::string& name : names) {
    all += (all.empty() ? "" : "|") + name;
    const size_t distance = edit_distance(word, name);
    if (distance < best) best = distance, nearest = name;
  }
  throw UsageError(what + ": expected " + all + ", got " +
                   (word.empty() ? "none" : "'" + word + "'") +
                   (nearest.empty() ? "" : " (did you mean " + nearest + "?)"));
}

CLI::App* find_command(CLI::App& app, const std::string& name) {
  std::vector<std::string> names;
  for (CLI::App* command : app.get_subcommands({})) {
    if (command->get_name() == name) return command;
    names.push_back(command->get_name());
  }
  refuse_word("command", names, name);
}

// What CLI11 found wrong with a command's words, in ours: what was expected, what was got.
[[noreturn]] void refuse_words(CLI::App& command, const CLI::ParseError& error) {
  const std::string text = error.what();
  const auto kind = static_cast<CLI::ExitCodes>(error.get_exit_code());
  if (kind == CLI::ExitCodes::ExtrasError) {
    const std::vector<std::string> extras = command.get_parent()->remaining(true);
    const std::string word = extras.empty() ? "" : extras.front();
    if (!word.starts_with('-')) {
      const bool is_help = command.get_name() == "help";
      throw UsageError(command.get_name() + ": expected " +
                       (is_help ? "one command" : "options alone") + ", got '" + word + "'");
    }
    std::vector<std::string> names;
    for (const CLI::Option* option : command.get_options()) {
      if (!option->get_lnames().empty()) names.push_back("--" + option->get_lnames().front());
    }
    refuse_word(command.get_name(), names, word.substr(0, word.find('=')));
  }
  if (kind == CLI::ExitCodes::RequiredError)
    static_cast<void>(parse_argument(""));  // explain without a case
  std::string name = text.substr(0, text.find_first_of(": "));
  if (!name.starts_with('-')) name = "--" + name;  // as it calls flags
  const CLI::Option* option = command.get_option_no_throw(name);
  if (kind == CLI::ExitCodes::ArgumentMismatch && option != nullptr) {
    const size_t count = option->results().size();
    if (option->get_type_name().empty()) throw UsageError(name + ": expected no value, got one");
    throw UsageError(name + ": expected " + option->get_type_name() + ", got " +
                     (count == 0 ? "none" : std::to_string(count) + " values"));
  }
  throw UsageError(text + " (see deltic help)");
}

// I/N, with 1 <= I <= N <= 1000.
void add_share(CLI::App* command, int& part, int& parts) {
  const auto read = [&part, &parts](const std::string& text) {
    const char* const end = text.data() + text.size();
    int i = 0, n = 0;
    const auto first = std::from_chars(text.data(), end, i);
    const bool has_two = first.ec == std::errc() && first.ptr != end && *first.ptr == '/';
    const auto second = std::from_chars(has_two ? first.ptr + 1 : end, end, n);
    if (second.ec != std::errc() || second.ptr != end || i < 1 || i > n || n > 1000)
      throw UsageError("--share: expected I/N with 1 <= I <= N <= 1000, got '" + text + "'");
    part = i, parts = n;
  };
  command
      ->add_option_function<std::string>(
          "--share", read, "Of the cases chosen every N-th, from the I-th on: for N machines")
      ->type_name("I/N");
}

void add_quick(CLI::App* command, bool& quick, const std::string& what, const std::string& whole) {
  command
      ->add_flag_callback(
          "--quick", [&quick] { quick = true; }, what + (quick ? " (default)" : ""))
      ->disable_flag_override();
  command
      ->add_flag_callback(
          "--all", [&quick] { quick = false; }, whole + (quick ? "" : " (default)"))
      ->disable_flag_override();
}

int run(int argc, char** argv, bool is_quick) {
  CLI::App app{
      "deltic: delta-rule linear attention (DeltaNet, Gated DeltaNet, Kimi Delta Attention).\n"
      "Exit status: 0 nothing failed (a case that no implementation takes is skipped), 1 a case or "
      "a\n"
      "claim failed or output could not be written, 2 usage error or no case matched."};
  app.name("deltic");
  app.set_version_flag("--version", "deltic " + std::string(deltic::version()));
  app.require_subcommand(1);
  app.footer(kEnvironment);
  const std::string grammar = "\n" + deltic::cases::grammar_help();

  InfoOptions info;
  CLI::App* info_command =
      app.add_subcommand("info", "Version, build, instruction sets, threads, implementations");
  add_common(info_command, info.common);

  ExplainOptions explain;
  CLI::App* explain_command = app.add_subcommand(
      "explain", "Which implementation would run a case, and why not the others");
  std::vector<std::string> words;
  explain_command->add_option("case", words, "The case, quoted or not")->required();
  explain_command->add_option("--impl", explain.impl, "Ask for this implementation")
      ->type_name("NAME");
  add_number(explain_command, "--sms", explain.sms, 4, 1024, "a whole number from 4 to 1024",
             "With --device cuda: divide the work for a GPU of so many SMs (default: the GPU here, "
             "or 132, an H200)")
      ->type_name("N");
  explain_command->footer(grammar);
  add_device(explain_command, explain.common);
  add_common(explain_command, explain.common);

  VerifyOptions verify;
  CLI::App* verify_command = app.add_subcommand(
      "verify", "Run every case on every implementation that takes it, against the fp64 oracle");
  add_filter(verify_command, verify.filters);
  verify_command->add_option("--impl", verify.impl, "Only this implementation")->type_name("NAME");
  verify_command
      ->add_option("--cases", verify.files,
                   "Files or folders of cases (default: the built-in ones)")
      ->type_name("PATH")
      ->expected(1)
      ->take_all();
  add_seed(verify_command, verify.seed);
  verify_command->add_flag("--list", verify.list, "Print the canonical lines and run nothing")
      ->disable_flag_override();
  verify.quick = is_quick;
  add_quick(verify_command, verify.quick,
            "A few small cases of every feature, in seconds; without --filter and --cases only",
            "Every case");
  add_share(verify_command, verify.part, verify.parts);
  verify_command->footer(grammar);
  add_device(verify_command, verify.common, &verify.both_devices);
  add_common(verify_command, verify.common);

  BenchOptions bench;
  CLI::App* bench_command = app.add_subcommand(
      "bench",
      "Check, then measure: time, rates, per cent of the machine's roof, ratio to a baseline");
  bench_command->add_option("case", bench.lines,
                            "Cases to measure instead of a suite, one argument each");
  bench_command->add_option("--suite", bench.suites, "Suites (default: cpu, or quick; see --list)")
      ->type_name("NAME")
      ->expected(1)
      ->take_all();
  add_filter(bench_command, bench.filters);
  bench_command
      ->add_option("--cases", bench.files,
                   "Files or folders of cases to measure instead of a suite")
      ->type_name("PATH")
      ->expected(1)
      ->take_all();
  bench_command
      ->add_option("--anchors", bench.anchors,
                   "File of other libraries' times; its rows become suites (see --list)")
      ->type_name("PATH");
  bench_command->add_option("--impl", bench.impl, "Measure this implementation")->type_name("NAME");
  add_seed(bench_command, bench.seed);
  add_number(bench_command, "--time", bench.seconds, 1e-6, 86400.0,
             "seconds above 0, at most 86400",
             "Seconds per row and side, at least 5 runs (default: 6, or with --quick 0.5)")
      ->type_name("S");
  bench_command->add_flag("--list", bench.list, "Print the suites and their cases and run nothing")
      ->disable_flag_override();
  bench_command->add_option("--compare", bench.compare, "Compare two JSON results; fails on a loss")
      ->type_name("OLD NEW")
      ->expected(2);
  const CLI::Option* threshold =
      bench_command
          ->add_option("--threshold", bench.threshold, "Smallest change that --compare lists")
          ->capture_default_str()
          ->type_name("PERCENT");
  bench.quick = is_quick;
  add_quick(bench_command, bench.quick,
            "The suite quick, and half a second per row and side unless --time says",
            "The suite cpu, and 6 seconds");
  bench_command->footer(grammar);
  add_device(bench_command, bench.common);
  add_common(bench_command, bench.common);

  DemoOptions demo;
  CLI::App* demo_command = app.add_subcommand(
      "demo", "What the library does, shown with measured numbers in under a minute");
  add_number(demo_command, "--step", demo.step, 1, kDemoSteps,
             "a whole number from 1 to " + std::to_string(kDemoSteps), "Only this step")
      ->type_name("N");
  add_common(demo_command, demo.common);

  std::string help_of;
  CLI::App* help_command = app.add_subcommand("help", "This text, or that of a command");
  help_command->add_option("command", help_of, "The command");
  const std::string help = app.help();  // after parsing it would be that of `help`

  CLI::App* command = nullptr;  // null: an option of the program's own comes first
  try {
    if (argc > 1 && argv[1][0] != '-') command = find_command(app, argv[1]);
    app.parse(argc, argv);
    if (help_command->parsed()) {
      const std::string text = help_of.empty() ? help : find_command(app, help_of)->help("deltic");
      std::fputs(text.c_str(), stdout);
      return kExitPass;
    }
    deltic::check_abi();
    if (info_command->parsed()) return run_info(info);
    if (explain_command->parsed()) {
      for (const std::string& word : words)
        explain.line += (explain.line.empty() ? "" : " ") + word;
      return run_explain(explain);
    }
    // The program's own loops take as many as OpenMP has, and libgomp dies of 70,000.
    constexpr int kMostThreads = 4096;
    if (const int threads = deltic::num_threads(); threads > kMostThreads) {
      throw UsageError("OMP_NUM_THREADS: expected at most " + std::to_string(kMostThreads) +
                       ", got " + std::to_string(threads));
    }
    if (verify_command->parsed()) return run_verify(verify);
    if (demo_command->parsed()) return run_demo(demo);
    if (threshold->count() > 0) {
      static_cast<void>(parse_percent(bench.threshold));
      if (bench.compare.empty())
        throw UsageError("--threshold: expected --compare beside it, got none");
    }
    return bench.compare.empty() ? run_bench(bench) : run_compare(bench);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);
    if (command != nullptr) refuse_words(*command, e);
    find_command(app, argc > 1 ? argv[1] : "");
    throw;
  }
}

}  // namespace

namespace deltic::cli {

int run_program(int argc, char** argv, bool is_quick) {
  try {
    const int status = run(argc, argv, is_quick);
    flush_output();
    return status;
  } catch (const UsageError& e) {
    std::fprintf(stderr, "deltic: %s\n", e.what());
    return kExitUsage;
  } catch (const deltic::cases::CaseError& e) {
    std::fprintf(stderr, "deltic: %s\n", e.what());
    return kExitUsage;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "deltic: not enough memory\n");
    return kExitFail;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "deltic: %s\n", e.what());
    return kExitFail;
  }
}

}  // namespace deltic::cli
