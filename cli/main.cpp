// The program deltic: reads the command line and calls one command.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

#include "commands.h"

namespace {

using namespace deltic::cli;

void add_common(CLI::App* command, Common& common) {
  command
      ->add_option(
          "--json", common.json,
          "Write the result as JSON to this file; - is stdout, and text then goes to stderr")
      ->type_name("PATH");
  command->add_option("--threads", common.threads, "Threads (default: all the process may use)")
      ->check(CLI::Range(1, 4096))
      ->type_name("N");
}

void add_filter(CLI::App* command, std::vector<std::string>& filters) {
  command
      ->add_option(
          "--filter", filters,
          "Only cases for which every blank-separated term holds: key=value, or a piece of the "
          "canonical line")
      ->type_name("TERMS")
      ->expected(1)
      ->take_all();
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "deltic: delta-rule linear attention (DeltaNet, Gated DeltaNet, Kimi Delta Attention).\n"
      "Exit status: 0 passed, 1 failed, 2 usage error or no case matched."};
  app.name("deltic");
  app.set_version_flag("--version", "deltic " + std::string(deltic::version()));
  app.require_subcommand(1);
  const std::string grammar = "\n" + deltic::cases::grammar_help();

  InfoOptions info;
  CLI::App* info_command =
      app.add_subcommand("info", "Version, build, instruction sets, threads, implementations");
  add_common(info_command, info.common);

  ExplainOptions explain;
  CLI::App* explain_command = app.add_subcommand(
      "explain", "Which implementation would run a case, and why not the others");
  explain_command->add_option("case", explain.line, "The case, as one argument")->required();
  explain_command->add_option("--impl", explain.impl, "Ask for this implementation")
      ->type_name("NAME");
  explain_command->footer(grammar);
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
  verify_command
      ->add_option("--seed", verify.seed, "Seed of every case's inputs (default: as they say)")
      ->check(CLI::NonNegativeNumber)
      ->type_name("N");
  verify_command->add_flag("--list", verify.list, "Print the canonical lines and run nothing");
  verify_command->footer(grammar);
  add_common(verify_command, verify.common);

  BenchOptions bench;
  CLI::App* bench_command = app.add_subcommand(
      "bench",
      "Check, then measure: time, rates, per cent of the machine's roof, ratio to a baseline");
  bench_command->add_option("case", bench.lines,
                            "Cases to measure instead of a suite, one argument each");
  bench_command->add_option("--suite", bench.suites, "Suites (default: cpu; see --list)")
      ->type_name("NAME")
      ->expected(1)
      ->take_all();
  add_filter(bench_command, bench.filters);
  bench_command->add_option("--cases", bench.files, "Files of cases to measure instead of a suite")
      ->type_name("PATH")
      ->expected(1)
      ->take_all();
  bench_command->add_option("--impl", bench.impl, "Measure this implementation")->type_name("NAME");
  bench_command->add_option("--seed", bench.seed, "Seed of every case's inputs")
      ->check(CLI::NonNegativeNumber)
      ->type_name("N");
  bench_command->add_option("--time", bench.seconds, "Seconds per row and side (at least 5 runs)")
      ->check(CLI::PositiveNumber)
      ->capture_default_str()
      ->type_name("S");
  bench_command->add_flag("--list", bench.list, "Print the suites and their cases and run nothing");
  bench_command->add_option("--compare", bench.compare, "Compare two JSON results; fails on a loss")
      ->type_name("OLD NEW")
      ->expected(2);
  bench_command->add_option("--threshold", bench.threshold, "Smallest change that --compare lists")
      ->capture_default_str()
      ->type_name("PERCENT");
  bench_command->footer(grammar);
  add_common(bench_command, bench.common);

  DemoOptions demo;
  CLI::App* demo_command = app.add_subcommand(
      "demo", "What the library does, shown with measured numbers in under a minute");
  add_common(demo_command, demo.common);

  try {
    app.parse(argc, argv);
    deltic::check_abi();
    if (info_command->parsed()) return run_info(info);
    if (explain_command->parsed()) return run_explain(explain);
    if (verify_command->parsed()) return run_verify(verify);
    if (demo_command->parsed()) return run_demo(demo);
    return bench.compare.empty() ? run_bench(bench) : run_compare(bench);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? kExitPass : kExitUsage;
  } catch (const UsageError& e) {
    std::fprintf(stderr, "deltic: %s\n", e.what());
    return kExitUsage;
  } catch (const deltic::cases::CaseError& e) {
    std::fprintf(stderr, "deltic: %s\n", e.what());
    return kExitUsage;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "deltic: %s\n", e.what());
    return kExitFail;
  }
}
