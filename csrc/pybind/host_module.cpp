// ikbo._host: the pure host side (configs) for tests, docs and tools. No tensors, no torch, no
// CUDA.

#include <pybind11/pybind11.h>

#include "config/group_candidates.h"

namespace py = pybind11;

PYBIND11_MODULE(_host, m) {
  m.doc() = "Host side of ikbo's kernels: which configuration a problem gets.";
  using Config = ikbo::GroupCandidatesConfig;
  py::class_<Config>(m, "GroupCandidatesConfig")
      .def_readonly("passes", &Config::passes)
      .def_readonly("single_cta", &Config::single_cta)
      .def_readonly("tiles", &Config::tiles)
      .def_property_readonly("launches", &Config::launches)
      .def("scratch_words", &Config::scratch_words, py::arg("rows"))
      .def("__repr__", [](const Config& config) { return ikbo::to_json(config); });
  m.def("group_candidates_config", &ikbo::group_candidates_config, py::arg("rows"),
        py::arg("n_users"));
}
