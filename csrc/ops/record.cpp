#include "ops/record.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <map>
#include <sstream>
#include <stdexcept>
#include <string_view>

namespace ikbo {
namespace {

std::atomic<PathSite*> first_site{nullptr};
std::atomic<bool> strict{false};

struct Record {
  const char* path;
  const char* reason;
  std::string config;
};
// Keyed by op; a handful of ops, so the map stays tiny.
thread_local std::map<std::string_view, Record> last_records;

}  // namespace

PathSite::PathSite(const char* op, Kind kind, const char* path, const char* reason)
    : op_(op), kind_(kind), path_(path), reason_(reason), next_(first_site.load()) {
  while (!first_site.compare_exchange_weak(next_, this)) {
  }
}

void PathSite::hit(const std::string& config) {
  if (kind_ == Kind::kReference && strict.load(std::memory_order_relaxed)) {
    throw std::runtime_error("ikbo." + std::string(op_) +
                             ": strict mode expects a Hopper kernel, "
                             "got the reference path: " +
                             reason_ + ". Change what the reason names, or leave strict mode.");
  }
  count_.fetch_add(1, std::memory_order_relaxed);
  Record& record = last_records[op_];
  record.path = path_;
  record.reason = reason_;
  record.config = config;
  if (kind_ == Kind::kReference && !warned_.exchange(true)) {
    const std::string text = "ikbo." + std::string(op_) +
                             " runs on the reference path: " + reason_ +
                             ". Results are right, speed is not what it could be.";
    aoti_torch_warn(__func__, "ikbo", __LINE__, text.c_str());
  }
}

std::string counters_json() {
  std::ostringstream json;
  json << "[";
  const char* comma = "";
  for (const PathSite* site = first_site.load(); site; site = site->next_) {
    json << comma << "{\"op\": \"" << site->op_ << "\", \"path\": \"" << site->path_
         << "\", \"reason\": \"" << site->reason_ << "\", \"count\": " << site->count_.load()
         << "}";
    comma = ", ";
  }
  json << "]";
  return json.str();
}

void counters_reset() {
  for (PathSite* site = first_site.load(); site; site = site->next_) site->count_.store(0);
}

std::string last_record_json(const char* op) {
  const auto found = last_records.find(op);
  if (found == last_records.end()) return "null";
  const Record& record = found->second;
  std::ostringstream json;
  json << "{\"op\": \"" << op << "\", \"path\": \"" << record.path << "\", \"reason\": \""
       << record.reason << "\"";
  if (!record.config.empty()) json << ", \"config\": " << record.config;
  json << "}";
  return json.str();
}

void set_strict(bool on) { strict.store(on); }

}  // namespace ikbo
