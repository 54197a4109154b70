// The Python module zshard._C: plain host objects only. Everything that takes a tensor goes through
// torch.ops.zshard (ops.cpp), whose registration runs when this module is loaded.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/headeronly/version.h>

#include <exception>
#include <stdexcept>
#include <string>

#include "layout.h"
#include "rendezvous.h"

namespace py = pybind11;

namespace {

std::string compiler() {
#if defined(__clang__)
    return "clang " __clang_version__;
#else
    return "gcc " __VERSION__;
#endif
}

py::object text_or_none(const std::string& text) {
    return text.empty() ? py::object(py::none()) : py::object(py::str(text));
}

py::dict build_info() {
    py::dict info;
    info["compiler"] = compiler();
    info["flags"] = ZSHARD_BUILD_FLAGS;
    info["cuda"] = text_or_none(ZSHARD_BUILD_CUDA_VERSION);
    info["cuda_archs"] = py::str(ZSHARD_BUILD_CUDA_ARCHS).attr("split")();
    info["torch_headers"] = TORCH_VERSION;
    return info;
}

// Bad arguments surface as zshard's own error class, as they do everywhere else.
void raise_input_error(std::exception_ptr thrown) {
    try {
        std::rethrow_exception(thrown);
    } catch (const std::invalid_argument& error) {
        py::set_error(py::module_::import("zshard.errors").attr("InputError"), error.what());
    }
}

}  // namespace

PYBIND11_MODULE(_C, module) {
    using zshard::FlatLayout;
    using zshard::Range;

    py::register_local_exception_translator(&raise_input_error);

    py::class_<Range>(module, "Range")
        .def_readonly("begin", &Range::begin)
        .def_readonly("end", &Range::end)
        .def_property_readonly("numel", &Range::numel)
        .def("__repr__", [](const Range& range) {
            return "Range(begin=" + std::to_string(range.begin) +
                   ", end=" + std::to_string(range.end) + ")";
        });

    py::class_<FlatLayout>(module, "FlatLayout")
        .def_readonly("offsets", &FlatLayout::offsets)
        .def_readonly("numels", &FlatLayout::numels)
        .def_readonly("world_size", &FlatLayout::world_size)
        .def_readonly("total", &FlatLayout::total)
        .def_readonly("shard_size", &FlatLayout::shard_size)
        .def("intersection", &FlatLayout::intersection, py::arg("segment"), py::arg("rank"));

    using zshard::Rendezvous;
    using Unlocked = py::call_guard<py::gil_scoped_release>;
    py::class_<Rendezvous>(module, "Rendezvous")
        .def(py::init<uintptr_t, int64_t, int64_t, int64_t>(), py::arg("memory"), py::arg("stride"),
             py::arg("world_size"), py::arg("rank"))
        .def("arrive", &Rendezvous::arrive)
        .def("depart", &Rendezvous::depart)
        .def("await_arrivals", &Rendezvous::await_arrivals, py::arg("seconds"), Unlocked())
        .def("await_departures", &Rendezvous::await_departures, py::arg("seconds"), Unlocked());

    module.attr("ALIGN") = zshard::kAlign;
    module.def("flat_layout", &zshard::flat_layout, py::arg("numels"), py::arg("world_size"));
    module.def("build_info", &build_info);
}
