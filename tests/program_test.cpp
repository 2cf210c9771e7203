// The program deltic from outside: exit codes, the words of its errors, JSON, and that its demo
// learns.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "cases/check.h"

namespace {

struct Outcome {
  int status = -1;
  std::string text;  // stdout and stderr
};

// `to`: where the shell sends stdout instead; the text is then that of stderr alone.
Outcome run(const std::string& arguments, const std::string& environment = {},
            const std::string& to = {}) {
  const std::string command = "env -u DELTIC_IMPL -u DELTIC_CHECKED -u DELTIC_LOG " + environment +
                              " " DELTIC_PROGRAM " " + arguments + " 2>&1 " + to;
  Outcome result;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return result;
  std::array<char, 4096> part;
  for (size_t n = 0; (n = std::fread(part.data(), 1, part.size(), pipe)) > 0;) {
    result.text.append(part.data(), n);
  }
  const int status = pclose(pipe);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

std::string read(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class Program : public testing::Test {
 protected:
  std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("deltic_program_" + std::to_string(::getpid()));
  void SetUp() override { std::filesystem::create_directories(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path(const char* name) const { return (folder_ / name).string(); }
};

void expect_usage_error(const std::string& arguments, const std::string& text) {
  const Outcome r = run(arguments);
  EXPECT_EQ(r.status, 2) << arguments << "\n" << r.text;
  EXPECT_EQ(r.text, "deltic: " + text + "\n") << arguments;
}

TEST_F(Program, WordsThatNobodyTakesAreNamed) {
  expect_usage_error("info extra", "info: expected options alone, got 'extra'");
  expect_usage_error("info extra more", "info: expected options alone, got 'extra'");
  expect_usage_error("verify -- stray", "verify: expected options alone, got 'stray'");
  expect_usage_error("help info demo", "help: expected one command, got 'demo'");
  expect_usage_error("info --bogus=3", "info: expected --help|--json|--threads, got '--bogus'");
  expect_usage_error("info --jsn x",
                     "info: expected --help|--json|--threads, got '--jsn' (did you mean --json?)");
  expect_usage_error("explain",
                     "case: expected an operation, got an empty line (a line: forward gate=head "
                     "dense=1x4096 H=16 K=128 V=128)");
  expect_usage_error("info --json", "--json: expected PATH, got none");
  expect_usage_error("info --json ''", "--json: expected a file's name or -, got ''");
  expect_usage_error("info --json a --json b", "--json: expected PATH, got 2 values");
  expect_usage_error("bench --compare a", "--compare: expected OLD NEW, got 1 values");
  expect_usage_error("bench --time", "--time: expected S, got none");
  for (const char* flag : {"--quick", "--all", "--list"}) {
    expect_usage_error(std::string("verify ") + flag + "=3",
                       std::string(flag) + ": expected no value, got one");
  }
  const std::string all = "command: expected info|explain|verify|bench|demo|help, got ";
  expect_usage_error("", all + "none");
  expect_usage_error("--bogus", all + "'--bogus'");
}

TEST_F(Program, NamesThatAreMissingInTheEnvironment) {
  const std::pair<const char*, const char*> all[] = {
      {"DELTIC_IMPL=forward:", "DELTIC_IMPL: expected an implementation of forward ("},
      {"DELTIC_IMPL=:cpu.plain", "DELTIC_IMPL: expected an operation before ':', got none\n"}};
  for (const auto& [environment, text] : all) {
    const Outcome r = run("explain 'forward K=16'", environment);
    EXPECT_EQ(r.status, 2) << r.text;
    EXPECT_NE(r.text.find(text), std::string::npos) << r.text;
    EXPECT_NE(r.text.find(", got none\n"), std::string::npos) << r.text;
  }
}

TEST_F(Program, WrongNumbersAreNamed) {
  for (const char* value : {"0", "-1", "4097", "two", "1.5", "99999999999999999999", "''"}) {
    expect_usage_error(std::string("info --threads ") + value,
                       std::string("--threads: expected a whole number from 1 to 4096, got '") +
                           (value[0] == '\'' ? "" : value) + "'");
  }
  for (const char* command : {"verify", "bench"}) {
    expect_usage_error(std::string(command) + " --seed -1",
                       "--seed: expected a whole number from 0 to 9223372036854775807, got '-1'");
  }
  for (const char* value : {"0", "-2", "nan", "inf", "soon"}) {
    expect_usage_error(
        std::string("bench --time ") + value,
        std::string("--time: expected seconds above 0, at most 86400, got '") + value + "'");
  }
  for (const char* value : {"0/2", "3/2", "1/1001", "1", "1/", "/2", "1/2/3", "-1/2", "a/b"}) {
    expect_usage_error(
        std::string("verify --share ") + value,
        std::string("--share: expected I/N with 1 <= I <= N <= 1000, got '") + value + "'");
  }
  const Outcome beyond = run("verify --list --filter 'op=commit K=128' --share 900/1000");
  EXPECT_EQ(beyond.status, 2);
  EXPECT_NE(beyond.text.find("--share: expected I of at most "), std::string::npos) << beyond.text;
  expect_usage_error("demo --step 9", "--step: expected a whole number from 1 to 5, got '9'");
}

TEST_F(Program, SharesOfTheCasesAreAllOfThem) {
  const auto lines = [&](const std::string& more) {
    std::multiset<std::string> all;
    std::istringstream text(run("verify --list --filter 'conv W=4' " + more).text);
    for (std::string line; std::getline(text, line);) all.insert(line);
    return all;
  };
  std::multiset<std::string> together;
  for (const char* share : {"1/3", "2/3", "3/3"}) {
    const auto part = lines(std::string("--share ") + share);
    EXPECT_GT(part.size(), 3u);
    together.insert(part.begin(), part.end());
  }
  EXPECT_EQ(together, lines(""));
}

TEST_F(Program, MisspeltCommandsAreNamedWithASuggestion) {
  const std::string all = "command: expected info|explain|verify|bench|demo|help, got ";
  expect_usage_error("bnech", all + "'bnech' (did you mean bench?)");
  expect_usage_error("verfy --list", all + "'verfy' (did you mean verify?)");
  expect_usage_error("help demmo", all + "'demmo' (did you mean demo?)");
  expect_usage_error("sideways", all + "'sideways'");
}

TEST_F(Program, HelpListsCommandsAndEnvironment) {
  for (const char* arguments : {"help", "--help"}) {
    const Outcome r = run(arguments);
    EXPECT_EQ(r.status, 0);
    for (const char* word : {"verify", "bench", "explain", "demo", "info", "DELTIC_IMPL",
                             "DELTIC_LOG", "DELTIC_CHECKED", "OMP_NUM_THREADS"}) {
      EXPECT_NE(r.text.find(word), std::string::npos) << arguments << ": " << word;
    }
  }
  EXPECT_NE(run("help verify").text.find("save=none|states|all"), std::string::npos);
}

// A refused case is no failure, a wrong one is, and nothing to do is an error of the caller: the
// same for both commands that run cases.
TEST_F(Program, BenchAndVerifyAgreeOnExitCodes) {
  const struct {
    const char *line, *options;
    int status;
  } rows[] = {
      {"forward dense=1x20 K=16 V=16", "", 0},
      {"forward dense=1x20 K=16 V=16 split=64", "", 0},       // refused
      {"forward dense=1x20 K=16 V=16", "--impl cpu.amx", 0},  // refused: fp32
      {"forward dense=1x20 K=300 V=16", "", 1},               // wrong
      {"forward dense=1x4000000000", "", 1},                  // too large
      {"decode dense=1x2 K=16 V=16", "--impl cpu.amx", 2},    // has no such implementation
      {"decode dense=1x2 K=16 V=16", "--filter forward", 2},  // none left
      {"decode dense=1x2 K=16 V=16", "--impl cpu.abacus", 2},
      {"sideways", "", 2},
  };
  for (const auto& row : rows) {
    std::ofstream(path("cases.txt")) << row.line << "\n";
    for (const char* command : {"verify", "bench --time 0.01"}) {
      const Outcome r =
          run(std::string(command) + " --cases " + path("cases.txt") + " " + row.options);
      EXPECT_EQ(r.status, row.status) << command << " " << row.line << " " << row.options << "\n"
                                      << r.text;
    }
  }
}

// The new operations from end to end, and what this machine cannot say about any of them.
TEST_F(Program, ConvAndGradientsAreCasesAndVerifySaysWhatWasNotRun) {
  std::ofstream(path("cases.txt")) << "conv seqs=9,1,0 D=40 init=1 act=silu dtype=bf16\n"
                                   << "conv_backward dense=2x9 D=40\n"
                                   << "kkt_backward gate=channel seqs=70,3 K=32 dtype=bf16\n";
  for (const char* command : {"verify", "bench --time 0.01"}) {
    const Outcome r = run(std::string(command) + " --cases " + path("cases.txt"));
    EXPECT_EQ(r.status, 0) << r.text;
    if (command == std::string("bench --time 0.01")) continue;
    size_t lines = 0;
    for (size_t at = 0; (at = r.text.find("\nnot run here: ", at)) != std::string::npos; ++at)
      ++lines;
    EXPECT_EQ(lines, deltic::cases::not_run_here().size()) << r.text;
    for (const deltic::ImplementationInfo& i : deltic::cases::not_run_here()) {
      EXPECT_NE(r.text.find("\nnot run here: " + i.name + " (" + i.sentence + ")\n"),
                std::string::npos)
          << r.text;
    }
  }
  EXPECT_EQ(run("explain 'conv_backward dense=2x9 D=40'").status, 0);
}

TEST_F(Program, WrongSettingsAndCasesAreNamed) {
  const Outcome checked =
      run("verify --filter 'dense=1x4 gate=none op=forward'", "DELTIC_CHECKED=yes");
  EXPECT_EQ(checked.status, 2);
  EXPECT_NE(checked.text.find("DELTIC_CHECKED: expected 0 or 1, got yes"), std::string::npos)
      << checked.text;
  const Outcome threads = run("demo --step 2", "OMP_NUM_THREADS=70000");
  EXPECT_EQ(threads.status, 2);
  EXPECT_NE(threads.text.find("OMP_NUM_THREADS: expected at most 4096, got 70000"),
            std::string::npos)
      << threads.text;
  for (const char* command : {"explain 'decode dense=1x2'", "explain 'decode dense=0x2'"}) {
    const Outcome log = run(command, "DELTIC_LOG=loud");
    EXPECT_EQ(log.status, 2) << log.text;
    EXPECT_NE(log.text.find("decode: DELTIC_LOG: expected dispatch, got loud"), std::string::npos)
        << log.text;
  }
  std::string line = "forward";
  for (const char* key : {"K", "V", "H", "seed", "pad", "scale"}) {
    line += std::string(" ") + key + "={1,2,3,4,5,6,7,8,9,10}";
  }
  expect_usage_error("bench '" + line + "'",
                     "case: line: expected at most 100000 cases from its braces, got 1000000");
}

// Wrong arguments are named first, on a machine without a GPU too; then that there is none.
TEST_F(Program, ArgumentsComeBeforeTheMachine) {
  const std::string on_gpu = " --device cuda ";
  expect_usage_error(
      "bench" + on_gpu + "--suite nosuch",
      "--suite: expected a name that --list prints, got 'nosuch' (--anchors FILE adds "
      "the suites of a file, in --list too)");
  expect_usage_error("bench --suite nosuch",
                     "--suite: expected a name that --list prints, got 'nosuch'");
  expect_usage_error(
      "bench" + on_gpu,
      "--suite: expected with --device cuda a name that `deltic bench --list --device "
      "cuda` prints (or cases), got none");
  expect_usage_error("bench 'decode dense=1x2'" + on_gpu + "--suite growth",
                     "--suite: expected no cases beside it, got both");
  for (const std::string command : {"bench", "verify"}) {
    const std::string none = command + ": no case matched";
    const std::string suite = command == "bench" ? "--suite growth " : "";
    expect_usage_error(command + on_gpu + suite + "--filter nosuch", none);
    expect_usage_error(command + on_gpu + suite + "--impl cpu.plain", none);
    const Outcome file = run(command + on_gpu + "--cases " + path("none.txt"));
    EXPECT_EQ(file.status, 2);
    EXPECT_NE(file.text.find(path("none.txt")), std::string::npos) << file.text;
    EXPECT_EQ(file.text.find("GPU"), std::string::npos) << file.text;
    EXPECT_EQ(run(command + on_gpu + "--list").status, 0) << "a list needs no GPU";
    const bool has_gpu = run("info").text.find("driver     none") == std::string::npos;
    if (has_gpu) continue;
    const Outcome fine = run(command + on_gpu + suite);
    EXPECT_EQ(fine.status, 2);
    EXPECT_EQ(fine.text.find("deltic: --device: expected a GPU, got none: "), 0u) << fine.text;
  }
}

// What is wrong with a setting is a fact beside others.
TEST_F(Program, InfoNamesWrongVariables) {
  for (const auto& [variable, fact] :
       {std::pair("DELTIC_CHECKED", "checked    DELTIC_CHECKED is neither 0 nor 1\n"),
        {"DELTIC_LOG", "log        DELTIC_LOG is not dispatch\n"}}) {
    const Outcome wrong = run("info", std::string(variable) + "=nonsense");
    EXPECT_EQ(wrong.status, 0) << wrong.text;
    EXPECT_NE(wrong.text.find(fact), std::string::npos) << wrong.text;
  }
  EXPECT_NE(run("info").text.find("  log        off\n"), std::string::npos);
  EXPECT_NE(run("info", "DELTIC_LOG=dispatch").text.find("  log        dispatch\n"),
            std::string::npos);
}

// Once, before the work, not for every case.
TEST_F(Program, WrongVariablesAreNamedOnce) {
  for (const char* variable : {"DELTIC_IMPL", "DELTIC_LOG", "DELTIC_CHECKED"}) {
    for (const char* command : {"verify", "bench 'decode dense=1x1'"}) {
      const Outcome outcome = run(command, std::string(variable) + "=nonsense");
      EXPECT_EQ(outcome.status, 2) << variable << " " << command;
      EXPECT_EQ(outcome.text.find(std::string("deltic: ") + variable + ": expected "), 0u)
          << outcome.text.substr(0, 300);
      EXPECT_EQ(std::count(outcome.text.begin(), outcome.text.end(), '\n'), 1) << variable;
    }
  }
}

TEST_F(Program, VerifyTakesBothDevices) {
  expect_usage_error("verify --device tpu", "--device: expected cpu, cuda or both, got 'tpu'");
  expect_usage_error("bench --device both --list", "--device: expected cpu or cuda, got 'both'");
  const auto list = [&](const std::string& device) {
    return run("verify --list --filter 'conv D=64' --device " + device).text;
  };
  // A case needs one of them: a build without CUDA has the CPU.
  EXPECT_EQ(list("both"), list("cpu"));
  EXPECT_NE(list("both").find("conv"), std::string::npos);
  const bool has_gpu = run("info").text.find("driver     none") == std::string::npos;
  const Outcome both = run("verify --device both --filter 'decode dense=2x20 gv=1'");
  if (has_gpu) {
    EXPECT_NE(both.text.find("cpu.plain"), std::string::npos) << both.text;
    EXPECT_NE(both.text.find("cuda.general"), std::string::npos) << both.text;
  } else {
    EXPECT_EQ(both.text.find("deltic: --device: expected a GPU, got none: "), 0u) << both.text;
  }
}

TEST_F(Program, JsonIsOpenedBeforeTheWork) {
  expect_usage_error("verify --json /does/not/exist.json",
                     "--json: expected a file that can be written, got '/does/not/exist.json'");
  expect_usage_error("bench --json " + folder_.string(),
                     "--json: expected a file that can be written, got '" + folder_.string() + "'");
  std::ofstream(path("old.json")) << std::string(100000, 'x');
  EXPECT_EQ(run("info --json " + path("old.json")).status, 0);
  EXPECT_EQ(read(path("old.json")).substr(0, 1), "{");
  EXPECT_EQ(read(path("old.json")).find('x', 90000), std::string::npos) << "old text is gone";
}

TEST_F(Program, InfoSaysWhatRunsOnlyWhenNamed) {
  EXPECT_EQ(run("info --json " + path("info.json")).status, 0);
  const std::string json = read(path("info.json")), text = run("info").text;
  std::set<std::string> names;
  size_t wanted = 0, found = 0;
  for (int op = 0; op < DELTIC_NUM_OPS; ++op) {
    for (const auto device : {deltic::DeviceType::cuda, deltic::DeviceType::cpu}) {
      for (const auto& i : deltic::implementations(static_cast<deltic::Op>(op), device)) {
        if (i.only_when_named) names.insert(i.name), ++wanted;
      }
    }
  }
  const std::string_view said = "\"only_when_named\": true";
  for (size_t at = 0; (at = json.find(said, at)) != std::string::npos; at += said.size()) ++found;
  EXPECT_EQ(found, wanted) << json;
  EXPECT_GE(wanted, size_t{DELTIC_NUM_OPS});  // the oracle of every operation
  for (const std::string& name : names) {
    const size_t line = text.find("\n  only when named: ");
    ASSERT_NE(line, std::string::npos) << text;
    EXPECT_NE(text.substr(line, text.find('\n', line + 1) - line).find(name), std::string::npos);
  }
}

// What was printed and did not arrive is an error in words, from every command.
TEST_F(Program, OutputThatGoesNowhereFails) {
  std::ofstream(path("cases.txt")) << "decode dense=1x2 K=16 V=16\n";
  const std::string of_file = " --cases " + path("cases.txt");
  const std::string commands[] = {"info",
                                  "help",
                                  "help bench",
                                  "--help",
                                  "--version",
                                  "bench --list",
                                  "verify --list" + of_file,
                                  "verify" + of_file,
                                  "verify --json -" + of_file,
                                  "bench --json - --time 0.01" + of_file,
                                  "explain 'decode dense=1x2'",
                                  "demo --step 1"};
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ::close(ends[0]);
  ASSERT_EQ(::dup2(ends[1], 9), 9);  // a shell can name it by one digit
  ::close(ends[1]);
  for (const std::string& command : commands) {
    for (const auto& [to, why] :
         {std::pair(">/dev/full", "No space left on device"), std::pair(">&9", "Broken pipe")}) {
      const Outcome r = run(command, "", to);
      EXPECT_EQ(r.status, 1) << command << " " << to << "\n" << r.text;
      const std::string sentence = "deltic: output: writing to stdout failed: ";
      EXPECT_NE(r.text.find(sentence + why + "\n"), std::string::npos) << command << "\n" << r.text;
    }
  }
  ::close(9);
  const Outcome r = run("verify --json /dev/full" + of_file);
  EXPECT_EQ(r.status, 1);
  EXPECT_NE(r.text.find("deltic: --json: writing to '/dev/full' failed\n"), std::string::npos)
      << r.text;
}

// Every kind of wrong file has its own sentence, in the program's words.
TEST_F(Program, WrongFilesAreNamed) {
  const auto file = [&](const std::string& text) {
    std::ofstream(path("file.json")) << text;
    return "'" + path("file.json") + "', ";
  };
  const std::string compare = "bench --compare " + path("file.json") + " " + path("file.json"),
                    anchors = "bench --device cuda --list --anchors " + path("file.json");
  const std::string no_result = "--compare: expected a result of deltic bench, got ",
                    no_times = "--anchors: expected a file of other libraries' times, got ";
  for (const auto& [command, start] :
       {std::pair(compare, no_result), std::pair(anchors, no_times)}) {
    std::filesystem::remove(path("file.json"));
    const std::string got = start + "'" + path("file.json") + "', ";
    expect_usage_error(command, got + "which cannot be read");
    std::filesystem::create_directory(path("file.json"));
    expect_usage_error(command, got + "which is a folder");
    std::filesystem::remove(path("file.json"));
    for (const char* text : {"", "nope", "{\"groups\": [", "{} {}"})
      expect_usage_error(command, start + file(text) + "which is no JSON");
  }
  const std::string bench = "{\"schema\": \"deltic.bench/1\", ";
  for (const char* text : {"[]", "3", "{}", "{\"schema\": 3}"})
    expect_usage_error(compare, no_result + file(text) + "which has no schema of deltic");
  expect_usage_error(compare, no_result + file("{\"schema\": \"deltic.info/1\"}") +
                                  "whose schema is deltic.info/1");
  expect_usage_error(
      compare, no_result + file(bench + "\"cases\": []}") + "which has no cases or no machine");
  expect_usage_error(compare, no_result + file(bench + "\"machine\": {}, \"cases\": [3]}") +
                                  "whose case 1 has no text suite");
  const std::string refused = "\"suite\": \"a\", \"case\": \"b\", \"status\": \"refused\"";
  for (const auto& [row, what] :
       {std::pair("{}", "no text suite"),
        {"{\"suite\": \"a\"}", "no text case"},
        {"{\"suite\": \"a\", \"case\": \"b\"}", "no text status"},
        {"{\"suite\": \"a\", \"case\": \"b\", \"threads\": \"1\"}",
         "threads that are no whole number"},
        {"{\"suite\": \"a\", \"case\": \"b\", \"median_ms\": 1}", "no number p10"}}) {
    const std::string text =
        bench + "\"machine\": {}, \"cases\": [{" + refused + "}, " + row + "]}";
    expect_usage_error(compare, no_result + file(text) + "whose case 2 has " + what);
  }
  file(bench + "\"machine\": {}, \"cases\": [{" + refused + "}]}");
  expect_usage_error(compare, "--compare: no row is in both results");
  for (const char* text : {"[]", "{}", "{\"groups\": 3}"})
    expect_usage_error(anchors, no_times + file(text) + "which has no list of groups");
  expect_usage_error(anchors,
                     no_times + file("{\"groups\": []}") + "whose list of groups is empty");
  expect_usage_error(anchors,
                     no_times + file("{\"groups\": [{}]}") + "whose group 1 has no list of rows");
  expect_usage_error(
      anchors, no_times + file("{\"groups\": [{\"rows\": []}]}") + "whose groups have no row");
  expect_usage_error(
      anchors, no_times + file("{\"groups\": [{\"rows\": [{\"op\": \"abacus\"}]}]}") +
                   "of whose rows none can be measured (abacus: an operation that bench does not "
                   "know)");
  expect_usage_error(
      anchors, no_times + file("{\"groups\": [{\"rows\": []}, {\"rows\": [{\"op\": 3}]}]}") +
                   "whose group 2, row 1 lacks a key of its operation, or has one of another type");
  expect_usage_error(
      anchors,
      no_times +
          file("{\"groups\": [{\"rows\": [{\"op\": \"kda_forward\", \"seqs\": [-1], \"H\": 1, "
               "\"flashkda\": 1}]}]}") +
          "whose group 1, row 1 is no case (case: seqs: expected a whole number from 0 to "
          "4294967296, got '-1')");
}

// What is no file of cases is said before anything runs, each kind in its own words.
TEST_F(Program, WrongFilesOfCasesAreNamed) {
  const std::string folder = path("empty");
  std::filesystem::create_directory(folder);
  std::ofstream(path("binary")) << "forward K=16\n" << std::string("\0\1\2", 3);
  std::ofstream(path("comments.txt")) << "# nothing yet\n\n";
  std::ofstream(path("bad.txt")) << "forward K=16\nforward K=x\n";
  for (const std::string command : {"verify --list --cases ", "bench --list --cases "}) {
    expect_usage_error(command + path("none.txt"), "case: file: expected a readable file, got '" +
                                                       path("none.txt") +
                                                       "' (No such file or directory)");
    expect_usage_error(command + path("binary"), "case: file: expected lines of text, got '" +
                                                     path("binary") + "', a binary file");
    expect_usage_error(command + "/dev/zero",
                       "case: file: expected lines of text, got '/dev/zero', a binary file");
    expect_usage_error(command + folder, "case: folder: expected files *.txt in it, got '" +
                                             folder + "', which has none");
    expect_usage_error(command + path("comments.txt"), "case: file: expected cases, got '" +
                                                           path("comments.txt") + "' without any");
    expect_usage_error(
        command + path("bad.txt"),
        path("bad.txt") + ":2: case: K: expected a whole number from 1 to 65536, got 'x'");
    if (::geteuid() != 0) {  // who may read everything meets no such file
      std::ofstream(path("closed.txt")) << "forward\n";
      std::filesystem::permissions(path("closed.txt"), std::filesystem::perms::none);
      expect_usage_error(command + path("closed.txt"),
                         "case: file: expected a readable file, got '" + path("closed.txt") +
                             "' (Permission denied)");
    }
  }
  std::ofstream(folder + "/some.txt") << "decode dense=1x2 K=16 V=16\n";
  EXPECT_EQ(run("bench --list --cases " + folder).status, 0) << "bench takes folders too";
}

TEST_F(Program, ThresholdsNeedAComparison) {
  expect_usage_error("bench --list --threshold foo",
                     "--threshold: expected per cent such as 5%, got 'foo'");
  expect_usage_error("bench --list --threshold 3%",
                     "--threshold: expected --compare beside it, got none");
}

// A case that nobody takes because somebody was named: who, by what, and why it does not.
TEST_F(Program, ExplainsThatASettingRestrictsIt) {
  const std::string refused = "explain 'forward dense=1x2 dtype=f32'";  // tiles multiply bf16
  if (run("info").text.find("cpu.amx") == std::string::npos) GTEST_SKIP() << "a build without AMX";
  for (const auto& [command, environment] :
       {std::pair(refused + " --impl cpu.amx", std::string()),
        std::pair(refused, std::string("DELTIC_IMPL=cpu.amx"))}) {
    const Outcome r = run(command, environment);
    EXPECT_EQ(r.status, 1) << r.text;
    for (const char* text : {"  no   named (impl or DELTIC_IMPL), but does not take the call: ",
                             "\n  nothing runs this case: cpu.amx alone may (impl or "
                             "DELTIC_IMPL), and does not take "
                             "it\n"}) {
      EXPECT_NE(r.text.find(text), std::string::npos) << r.text;
    }
    EXPECT_EQ(r.text.find("no implementation takes"), std::string::npos) << r.text;
  }
}

TEST_F(Program, UnknownFilterKeysAreNamed) {
  for (const char* command : {"verify --list", "bench --list"}) {
    for (const char* filter : {"colour=red", "op=decode colour=red", "=3"}) {
      const Outcome r = run(command + std::string(" --filter '") + filter + "'");
      EXPECT_EQ(r.status, 2) << r.text;
      const bool is_named = filter[0] != '=';
      EXPECT_EQ(r.text.find("deltic: filter: key: expected one of op "), 0u) << r.text;
      for (const char* key : {" gate ", " dense ", " dtype ", " seed"})
        EXPECT_NE(r.text.find(key), std::string::npos) << key << "\n" << r.text;
      EXPECT_NE(r.text.find(is_named ? ", got 'colour'\n" : ", got ''\n"), std::string::npos)
          << r.text;
    }
    EXPECT_EQ(run(command + std::string(" --filter op=decode --filter dense")).status, 0);
  }
  EXPECT_EQ(run("bench --list --filter T=4096").status, 0) << "a piece of a label";
}

// A case without quotes is several arguments of a shell.
TEST_F(Program, ExplainTakesACaseInPieces) {
  const Outcome whole = run("explain 'decode gate=channel K=32' --impl cpu.plain");
  const Outcome pieces = run("explain decode gate=channel K=32 --impl cpu.plain");
  EXPECT_EQ(whole.status, 0) << whole.text;
  EXPECT_EQ(whole.text, pieces.text);
  expect_usage_error("explain decode --sms 5",
                     "--sms: expected it with --device cuda, got --device cpu");
}

TEST_F(Program, ExplainsBackward) {
  const Outcome r = run("explain 'backward dense=1x4096 H=2 K=128 V=128 save=all'");
  EXPECT_EQ(r.status, 0);
  for (const char* text : {"the first in the list that takes the call", "64 chunks of 64 tokens",
                           "segments of 8", "all (this case)", "saved bytes", "workspace bytes"}) {
    EXPECT_NE(r.text.find(text), std::string::npos) << text << "\n" << r.text;
  }
}

// The division of a forward's work, for a number of SMs: no GPU is needed.
TEST_F(Program, ExplainsTheDivisionOfWork) {
  if (run("info").text.find("sm_90a") == std::string::npos) GTEST_SKIP() << "a build without CUDA";
  const auto divisions = [](const std::string& line, const std::string& more = "") {
    const std::string text =
        run("explain --device cuda --sms 132 " + more + " '" + line + "'").text;
    const size_t at = text.find("work of cuda.sm90.forward on a GPU of 132 SMs");
    return at == std::string::npos ? std::string() : text.substr(at);
  };
  const auto first_row = [](const std::string& text) {
    const size_t at = text.find("\n\n");
    return at == std::string::npos ? std::string("no rows")
                                   : text.substr(at + 2, text.find("\n", at + 2) - at - 2);
  };
  // 96 heads fill the GPU; 4 heads of 131072 tokens leave it to a few chains unless they are cut.
  const std::string channel = "forward gate=channel K=128 V=128 dtype=bf16 gdtype=bf16 ";
  const std::string full = divisions(channel + "seqs=8192 H=96");
  EXPECT_EQ(first_row(full).find("  whole sequences"), 0u) << full;
  EXPECT_NE(full.find("preparers"), std::string::npos) << full;
  EXPECT_NE(full.find("2 segments of 64 chunks"), std::string::npos) << full;
  const std::string few = divisions(channel + "seqs=131072 H=4");
  EXPECT_NE(first_row(few).find(" segments of "), std::string::npos) << few;
  EXPECT_NE(few.find("  whole sequences"), std::string::npos) << few;
  // What was asked for is chosen, whatever it costs.
  const std::string off = divisions(channel + "seqs=131072 H=4 split=off");
  EXPECT_EQ(first_row(off).find("  whole sequences"), 0u) << off;
  EXPECT_NE(first_row(off).find("asked for by split"), std::string::npos) << off;
  const std::string by_length = divisions(channel + "seqs=131072 H=4 split=by_length");
  EXPECT_NE(first_row(by_length).find("64 segments of 32 chunks"), std::string::npos) << by_length;
  // A length that cuts nothing is no cut.
  const std::string none = divisions(channel + "seqs=1024,1024,1024,1024 H=16 split=2048");
  EXPECT_EQ(first_row(none).find("  whole sequences"), 0u) << none;
  // Gates per head: fused where jobs fill the GPU, in roles where they do not.
  const std::string head = "forward gate=head K=128 V=128 dtype=bf16 ";
  const std::string fused = divisions(head + "dense=8x1024 H=16 HV=32");
  EXPECT_EQ(first_row(fused).find("  fused: "), 0u) << fused;
  EXPECT_NE(fused.find("  whole sequences"), std::string::npos) << fused;
  EXPECT_EQ(fused.find("the longest first"), std::string::npos) << fused;
  const std::string packed = divisions(head + "seqs=64,4096,512,100,2048,1024,3,300 H=16 HV=32");
  EXPECT_EQ(first_row(packed).find("  fused: "), 0u) << packed;
  EXPECT_NE(first_row(packed).find("CTAs draw jobs, the longest first"), std::string::npos)
      << packed;
  const std::string roles = divisions(head + "dense=1x8192 H=16 HV=64");
  EXPECT_EQ(first_row(roles).find("  whole sequences"), 0u) << roles;
  EXPECT_NE(roles.find("  fused: "), std::string::npos) << roles;
  // Calls that it does not take, such as too many tokens, have the sentence why, which is neither
  // the machine's nor the build's; others have no division.
  const std::pair<std::string, const char*> refused[] = {
      {channel + "dense=1x4294967296 H=32", "more than 2^22 chunks, or 2^29 of all heads"},
      {"forward gate=head seqs=8192 H=4 K=128 V=128 dtype=f32", "q, k and v are not of 16 bits"},
      {channel + "seqs=8192 H=4 chunk=32", "its chunks have 64 tokens"},
      {"forward gate=head seqs=0 H=4 K=128 V=128 dtype=f32", "the call has no tokens"}};
  for (const auto& [line, sentence] : refused) {
    const std::string text =
        run("explain --device cuda --sms 132 '" + line + "' --json " + path("none.json")).text;
    EXPECT_NE(
        text.find("\n\n  cuda.sm90.forward divides no work here: " + std::string(sentence) + "\n"),
        std::string::npos)
        << text;
    EXPECT_EQ(text.find("work of cuda.sm90.forward"), std::string::npos) << text;
    const std::string json = read(path("none.json"));
    EXPECT_NE(json.find("\"not_divided\""), std::string::npos) << json;
    EXPECT_EQ(json.find("\"divisions\""), std::string::npos) << json;
  }
  EXPECT_EQ(divisions(channel + "seqs=8192 H=4", "--impl cuda.general"), "");
  expect_usage_error("explain --device cuda --sms 0 'forward seqs=64'",
                     "--sms: expected a whole number from 4 to 1024, got '0'");
  expect_usage_error("explain --sms 132 'forward seqs=64'",
                     "--sms: expected it with --device cuda, got --device cpu");
}
// And of a backward's chains.
TEST_F(Program, ExplainsTheDivisionOfChains) {
  if (run("info").text.find("sm_90a") == std::string::npos) GTEST_SKIP() << "a build without CUDA";
  const std::string line = "backward gate=head K=128 V=128 seqs=8192 ";
  const auto chains = [&](const std::string& more) {
    const std::string text = run("explain --device cuda --sms 132 '" + line + more + "'").text;
    const std::string title =
        "chains of states of cuda.sm90.backward on a GPU of 132 SMs, times as predicted, the "
        "chosen one first\n\n";
    const size_t at = text.find(title);
    return at == std::string::npos ? text : text.substr(at + title.size());
  };
  EXPECT_EQ(chains("dtype=bf16 H=64").find("  whole sequences"), 0u) << chains("dtype=bf16 H=64");
  const std::string few = chains("dtype=bf16 H=2");
  EXPECT_NE(few.substr(0, few.find('\n')).find(" segments of "), std::string::npos) << few;
  EXPECT_NE(few.find("  whole sequences"), std::string::npos) << few;
  const std::string given = chains("dtype=bf16 H=2 split=640");
  EXPECT_EQ(given.find("  13 segments of 10 chunks"), 0u) << given;
  EXPECT_NE(given.find("asked for by split"), std::string::npos) << given;
  EXPECT_EQ(given.find(" rounds"), std::string::npos) << given;
  const std::string many = chains("dtype=bf16 H=264 split=off");
  EXPECT_NE(many.find("; asked for by split; in 2 rounds, one after the other in the same "),
            std::string::npos)
      << many;
  EXPECT_NE(many.find(" MiB of workspace, of 132 heads each"), std::string::npos) << many;
  EXPECT_NE(chains("dtype=f32 H=2")
                .find("cuda.sm90.backward divides no work here: q, k and v are not bf16 or fp16"),
            std::string::npos);
}

TEST_F(Program, MeasuresBackward) {
  const Outcome r =
      run("bench --time 0.01 'backward dense=1x300 K=32 V=32 save={none,states,all}' "
          "--json " +
          path("bench.json"));
  EXPECT_EQ(r.status, 0) << r.text;
  for (const char* text : {"forward ms", "backward/forward", "saved MiB", "workspace MiB"}) {
    EXPECT_NE(r.text.find(text), std::string::npos) << text << "\n" << r.text;
  }
  const std::string json = read(path("bench.json"));
  for (const char* key : {"forward_ms", "backward_per_forward", "forward_and_backward_ms",
                          "saved_bytes", "workspace_bytes", "flops", "bytes"}) {
    EXPECT_NE(json.find("\"" + std::string(key) + "\""), std::string::npos) << key;
  }
}

// Work is counted by the formulas of cli/counts.h: here 7 K V for two tokens of two heads, and q,
// k, v, o, g, beta and both states in fp32.
TEST_F(Program, CountsOperationsAndBytes) {
  const Outcome r =
      run("bench --time 0.01 'decode dense=2x1 H=2 K=16 V=16 init=1 dtype=f32' --json " +
          path("bench.json"));
  ASSERT_EQ(r.status, 0) << r.text;
  const std::string json = read(path("bench.json"));
  EXPECT_NE(json.find("\"flops\": 7168.0"), std::string::npos) << json;
  EXPECT_NE(json.find("\"bytes\": 9248.0"), std::string::npos) << json;
}

// A loss is more than the threshold, and the middle 80 % of the runs do not overlap.
TEST_F(Program, CompareSeesLossesBeyondThresholdAndSpread) {
  const auto write = [&](const char* name, double median, double p10, double p90) {
    std::ofstream(path(name)) << "{\"schema\": \"deltic.bench/1\", \"machine\": {}, \"cases\": "
                              << "[{\"suite\": \"s\", \"case\": \"c\", \"median_ms\": " << median
                              << ", \"p10\": " << p10 << ", \"p90\": " << p90 << "}]}";
  };
  write("old.json", 10, 9.8, 10.2);
  struct Row {
    double median, p10, p90;
    int status;
    const char* text;
  };
  for (const Row& row : {Row{11, 10.3, 11.5, 1, "1 slower, 0 quicker, 0 unchanged"},
                         Row{11, 10.1, 11.5, 0, "0 slower, 0 quicker, 1 unchanged"},
                         Row{10.3, 10.25, 10.4, 0, "0 slower, 0 quicker, 1 unchanged"},
                         Row{9, 8.5, 9.7, 0, "0 slower, 1 quicker, 0 unchanged"},
                         Row{9, 8.5, 9.9, 0, "0 slower, 0 quicker, 1 unchanged"}}) {
    write("new.json", row.median, row.p10, row.p90);
    const Outcome r =
        run("bench --compare " + path("old.json") + " " + path("new.json") + " --threshold 5%");
    EXPECT_EQ(r.status, row.status) << r.text;
    EXPECT_NE(r.text.find(row.text), std::string::npos) << r.text;
  }
}

// The suites of a GPU can be listed anywhere; rows of a file of anchors among them.
TEST_F(Program, ListsTheSuitesOfAGpu) {
  const Outcome r = run("bench --device cuda --list --anchors " DELTIC_ANCHORS);
  EXPECT_EQ(r.status, 0) << r.text;
  std::map<std::string, int> rows, left_out;
  std::istringstream lines(r.text);
  std::string suite;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("  ", 0) == 0 && suite == "not measured, of the file of anchors") {
      std::istringstream words(line);
      std::string op;
      int count = 0;
      words >> op >> count;
      left_out[op] = count;
    } else if (line.rfind("  ", 0) == 0) {
      ++rows[suite];
    } else {
      suite = line;
    }
  }
  const std::map<std::string, int> expected = {{"blocks", 22},
                                               {"decode", 26},
                                               {"decode_tokens", 7},
                                               {"delta_forward", 29},
                                               {"gdn_backward", 8},
                                               {"gdn_backward_packed", 24},
                                               {"gdn_forward", 171},
                                               {"growth", 12},
                                               {"layers", 1},
                                               {"neighbours", 15},
                                               {"kda_backward", 8},
                                               {"kda_forward_random", 21},
                                               {"kda_forward_slow", 21},
                                               {"kda_forward_softplus", 6},
                                               {"options", 6},
                                               {"places", 2},
                                               {"step", 24},
                                               {"train", 19}};
  EXPECT_EQ(rows, expected);
  // Rows that no suite has are counted, with the reason.
  const std::map<std::string, int> expected_left_out = {
      {"gdn_decode", 3}, {"gdn_forward", 18}, {"kda_forward", 21}, {"kda_forward_log_form", 36}};
  EXPECT_EQ(left_out, expected_left_out);
  const std::string reason =
      "3 rows: not the call that is measured, or slower than the time it is compared with\n";
  EXPECT_NE(r.text.find(reason), std::string::npos) << reason;
  // Lengths that the source drew, and not the name of the row.
  const std::string packed = "  7053,1139 H=16 HV=32  ";
  EXPECT_NE(r.text.find(packed), std::string::npos) << packed;
  // A step is the call of delta_rule on CUDA tensors, for which forward keeps nothing.
  const size_t step = r.text.find("  KDA 8192 H=96 HV=96 bounded, slow  ");
  ASSERT_NE(step, std::string::npos) << r.text;
  const std::string line = r.text.substr(step, r.text.find('\n', step) - step);
  for (const char* part :
       {"backward gate=channel", "gates=slow", "form=bounded", "dfinal=0", "save=none"})
    EXPECT_NE(line.find(part), std::string::npos) << line;
  EXPECT_EQ(run("bench --list").text.find("kda_forward"), std::string::npos);
}

// The demo's own claim is 95 % of the questions; it exits with 1 below that.
TEST_F(Program, DemoLearnsToRecall) {
  const Outcome r = run("demo --step 5 --json " + path("demo.json"));
  EXPECT_EQ(r.status, 0) << r.text;
  const std::string json = read(path("demo.json"));
  const size_t at = json.find("\"recall\": ");
  ASSERT_NE(at, std::string::npos) << json;
  EXPECT_GE(std::atof(json.c_str() + at + 10), 0.95);
  EXPECT_EQ(r.text.find('\r'), std::string::npos) << "no terminal: plain lines";
  EXPECT_NE(r.text.find("loss"), std::string::npos);
}

}  // namespace
