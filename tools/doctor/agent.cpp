#include "tools/doctor/agent.h"

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/net/random.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"
#include "tools/doctor/probe.h"

namespace rz::doctor {
namespace {

using Json = nlohmann::json;

constexpr std::size_t max_line = 4 << 20;
/// Before a reply, so that a shell's greeting is not taken for one.
constexpr std::string_view mark = "doctor: ";

std::string line_of(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

void reply(const std::string& word, const std::string& json) {
  const std::string line = concat(mark, word, ' ', json, '\n');
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fflush(stdout);
}

/// Where a server is, and what proves that its client may come.
struct ProbeRequest {
  std::string address, token;
  int port = 0;
};

ProbeRequest parse_probe(const std::string& text) {
  const std::string source = "request";
  const Json json = parse_json(text, source, JsonDialect::strict);
  const JsonObject object(json, source);
  return {object.text("address", ""), object.text("token", ""),
          static_cast<int>(object.integer("port", 0, 0, 65535))};
}

std::string to_json(const ProbeRequest& r) {
  return line_of({{"address", r.address}, {"token", r.token}, {"port", r.port}});
}

void serve(const ProbeRequest& request) {
  ProbeServer server(request.address, STDIN_FILENO);
  reply("serving", line_of({{"port", server.port()}}));
  server.serve(request.token, Deadline::after(probe_timeout));
  reply("served", "{}");
}

void obey(const std::string& word, const std::string& json) {
  if (word == "facts") return reply("facts", doctor::to_json(read_facts(parse_request(json, "request"))));
  const ProbeRequest probe = parse_probe(json);
  if (word == "serve") return serve(probe);
  require(word == "measure", Errc::config, "'", word, "' is no request of this version");
  const PairMeasurement m = measure(probe.address, probe.port, probe.token, Deadline::after(probe_timeout));
  reply("measured", doctor::to_json(m));
}

}  // namespace

int run_agent() {
  for (std::string line; std::getline(std::cin, line);) {
    const auto space = line.find(' ');
    try {
      require(space != std::string::npos, Errc::config, "a request is a word and JSON");
      obey(line.substr(0, space), line.substr(space + 1));
    } catch (const std::exception& e) {
      reply("error", line_of({{"message", one_line(e)}}));
    }
  }
  return 0;
}

// It serves pairs at the ports of the job.
RemoteAgent::RemoteAgent(const std::vector<std::string>& shell, const std::string& host,
                         const std::string& program)
    : host_(host),
      errors_(memfd_create("errors", MFD_CLOEXEC)),
      connector_(hosts::remote_command(shell, host, program), {}, errors_ ? errors_.get() : STDERR_FILENO) {}

RemoteAgent::~RemoteAgent() {
  connector_.in.close();
  if (!connector_.process.wait(Deadline::after(std::chrono::seconds(2))))
    connector_.process.end_within(std::chrono::seconds(1));
}

std::string RemoteAgent::last_error() const {
  std::string text(4096, '\0');
  const off_t size = lseek(errors_.get(), 0, SEEK_END);
  const ssize_t n = pread(errors_.get(), text.data(), text.size(), std::max<off_t>(0, size - 4096));
  text.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  return escaped(text.substr(text.rfind('\n') + 1));
}

void RemoteAgent::fail_ended(const std::string& how) {
  const std::string why = last_error();
  fail(Errc::rendezvous, how, why.empty() ? "" : ": ", why);
}

void RemoteAgent::send(const std::string& word, const std::string& json) {
  const std::string line = concat(word, ' ', json, '\n');  // shorter than a pipe holds
  if (::write(connector_.in.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size()))
    fail_ended("the remote shell has ended");
}

std::string RemoteAgent::next_line(Deadline deadline) {
  for (;;) {
    if (const auto end = received_.find('\n'); end != std::string::npos) {
      std::string line = received_.substr(0, end);
      received_.erase(0, end + 1);
      if (line.ends_with('\r')) line.pop_back();
      return line;
    }
    if (received_.size() > max_line) fail_ended("an endless line came from it");
    if (deadline.expired()) fail_ended("no answer before the deadline");
    pollfd p{connector_.out.get(), POLLIN, 0};
    if (poll(&p, 1, deadline.poll_ms(1000)) <= 0) continue;
    char bytes[4096];
    const ssize_t n = ::read(connector_.out.get(), bytes, sizeof bytes);
    if (n == 0) fail_ended("the remote shell has ended");
    if (n > 0) received_.append(bytes, static_cast<std::size_t>(n));
  }
}

std::string RemoteAgent::receive(const std::string& word, Deadline deadline) {
  for (;;) {
    const std::string line = next_line(deadline);
    if (!line.starts_with(mark)) continue;
    const std::string text = line.substr(mark.size());
    const auto space = std::min(text.find(' '), text.size());
    const std::string json = text.substr(std::min(space + 1, text.size()));
    if (text.substr(0, space) == word) return json;
    if (text.starts_with("served ")) continue;  // of an earlier pair
    require(text.starts_with("error "), Errc::rendezvous, "it answered ", escaped(text.substr(0, 80)));
    const Json error = parse_json(json, host_, JsonDialect::strict);
    fail(Errc::rendezvous, escaped(JsonObject(error, host_).text("message", "?")));
  }
}

PairMeasurement measure_pair(RemoteAgent& from, RemoteAgent& to, const std::string& address) {
  PairMeasurement m;
  const Deadline deadline = Deadline::after(2 * probe_timeout);
  try {
    ProbeRequest request{address, net::random_hex(), 0};
    to.send("serve", to_json(request));
    const Json serving = parse_json(to.receive("serving", deadline), to.host(), JsonDialect::strict);
    request.port = static_cast<int>(JsonObject(serving, to.host()).required_integer("port", 1, 65535));
    from.send("measure", to_json(request));
    m = parse_measurement(from.receive("measured", deadline), from.host());
  } catch (const std::exception& e) {
    m.error = one_line(e);
  }
  m.from = from.host(), m.to = to.host(), m.address = address;
  return m;
}

}  // namespace rz::doctor
