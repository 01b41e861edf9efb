#include "ops/record.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace ikbo {
namespace {

std::atomic<PathSite*> first_site{nullptr};
std::atomic<bool> strict{false};

struct Record {
  const char* path = nullptr;  // null: the thread has not called the op
  const char* reason = nullptr;
  std::string config;  // JSON, or else what prints the bytes as JSON, if anything
  std::string (*print)(const void*) = nullptr;
  alignas(std::max_align_t) std::array<std::byte, kMaxConfigBytes> bytes;

  std::string config_json() const { return print ? print(bytes.data()) : config; }
};
thread_local std::vector<Record> last_records;  // by op index

// Every op that has a site, numbered as they come. Read and grown only when a site is made and by
// explain.
std::mutex op_names_mutex;
std::vector<std::string_view> op_names;

int index_of_op(std::string_view op) {
  const std::lock_guard lock(op_names_mutex);
  const auto found = std::find(op_names.begin(), op_names.end(), op);
  if (found == op_names.end()) {
    op_names.push_back(op);
    return static_cast<int>(op_names.size()) - 1;
  }
  return static_cast<int>(found - op_names.begin());
}

Record& last_record(int op_index) {
  if (last_records.size() <= static_cast<size_t>(op_index)) last_records.resize(op_index + 1);
  return last_records[op_index];
}

}  // namespace

PathSite::PathSite(const char* op, Kind kind, const char* path, const char* reason)
    : op_(op),
      op_index_(index_of_op(op)),
      kind_(kind),
      path_(path),
      reason_(reason),
      next_(first_site.load()) {
  while (!first_site.compare_exchange_weak(next_, this)) {
  }
}

void PathSite::count_call() {
  if (kind_ == Kind::kReference && strict.load(std::memory_order_relaxed)) {
    throw std::runtime_error("ikbo." + std::string(op_) +
                             ": strict mode expects a Hopper kernel, "
                             "got the reference path: " +
                             reason_ + ". Change what the reason names, or leave strict mode.");
  }
  count_.fetch_add(1, std::memory_order_relaxed);
}

void PathSite::hit(std::string config) {
  count_call();
  Record& record = last_record(op_index_);
  record.path = path_;
  record.reason = reason_;
  record.config = std::move(config);
  record.print = nullptr;
  if (kind_ == Kind::kReference && !warned_.exchange(true)) {
    const std::string text = "ikbo." + std::string(op_) +
                             " runs on the reference path: " + reason_ +
                             ". Results are right, speed is not what it could be.";
    aoti_torch_warn(__func__, "ikbo", __LINE__, text.c_str());
  }
}

void PathSite::hit_with(const void* config, size_t bytes, Print print) {
  count_call();
  Record& record = last_record(op_index_);
  record.path = path_;
  record.reason = reason_;
  record.print = print;
  std::memcpy(record.bytes.data(), config, bytes);
}

OpPaths::OpPaths(const char* op, const char* kernel_path)
    : op_(op),
      cpu_(op, PathSite::Kind::kCpu, "cpu", "CPU tensors"),
      kernel_(op, PathSite::Kind::kKernel, kernel_path, "") {}

void OpPaths::reference(const char* reason) {
  for (PathSite* site = first_site.load(); site; site = site->next_) {
    if (site->kind_ == PathSite::Kind::kReference && site->op_ == op_ && site->reason_ == reason) {
      return site->hit();
    }
  }
  // Sites live on. Two threads may make one each for the same reason: counts are added up.
  (new PathSite(op_, PathSite::Kind::kReference, "reference", reason))->hit();
}

bool OpPaths::takes_kernel(bool is_cuda, const char* reason) {
  if (!is_cuda) {
    cpu_.hit();
  } else if (reason != nullptr) {
    reference(reason);
  }
  return is_cuda && reason == nullptr;
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
  size_t index = last_records.size();
  {
    const std::lock_guard lock(op_names_mutex);
    index = std::find(op_names.begin(), op_names.end(), op) - op_names.begin();
  }
  if (index >= last_records.size() || last_records[index].path == nullptr) return "null";
  const Record& record = last_records[index];
  std::ostringstream json;
  json << "{\"op\": \"" << op << "\", \"path\": \"" << record.path << "\", \"reason\": \""
       << record.reason << "\"";
  if (const std::string config = record.config_json(); !config.empty()) {
    json << ", \"config\": " << config;
  }
  json << "}";
  return json.str();
}

void set_strict(bool on) { strict.store(on); }

}  // namespace ikbo
