// What an op's arguments must be. Every failure throws a std::runtime_error that begins with
// "zshard::<op>", gives the offending values and says what to do; zshard/op_call.py turns it into
// zshard.errors.InputError.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ops.h"

namespace zshard {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;

template <typename... Parts>
std::string text(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

inline std::string name_of(ScalarType type) {
    switch (type) {
        case ScalarType::Float:
            return "float32";
        case ScalarType::BFloat16:
            return "bfloat16";
        case ScalarType::Half:
            return "float16";
        case ScalarType::Double:
            return "float64";
        case ScalarType::Int:
            return "int32";
        case ScalarType::Long:
            return "int64";
        case ScalarType::Short:
            return "int16";
        case ScalarType::Byte:
            return "uint8";
        default:
            return torch::headeronly::toString(type);
    }
}

inline std::string device_of(const Tensor& t) {
    if (t.is_cpu()) return "cpu";
    return t.is_cuda() ? text("cuda:", t.get_device_index()) : "another device";
}

// "bfloat16 of shape (2, 3) and strides (1, 2) on cpu"
inline std::string describe(const Tensor& t) {
    const auto tuple = [&](auto values) {
        std::string s = "(";
        for (int64_t d = 0; d < t.dim(); ++d) s += text(d > 0 ? ", " : "", values[d]);
        return s + (t.dim() == 1 ? ",)" : ")");
    };
    return text(name_of(t.scalar_type()), " of shape ", tuple(t.sizes()), " and strides ",
                tuple(t.strides()), " on ", device_of(t));
}

// The checks of one op's call: an op's name and the device that its first tensor fixes.
class Checks {
 public:
    Checks(const char* op, const Tensor& first)
        : op_(op), first_(first), device_(device_index(first)) {}

    template <typename... Parts>
    [[noreturn]] void fail(const Parts&... parts) const {
        throw std::runtime_error(text("zshard::", op_, ": ", parts...));
    }

    // Where `parts` cost nothing to make; else ask first, and call fail.
    template <typename... Parts>
    void require(bool condition, const Parts&... parts) const {
        if (!condition) fail(parts...);
    }

    // `name` is what the message calls the tensor: a string, or a pair of a list's name and an
    // index.
    template <typename Name>
    void same_device(const Name& name, const Tensor& t) const {
        if (device_index(t) != device_)
            fail(spell(name), " is ", describe(t), ", but the call's first tensor is on ",
                 device_of(first_), ": move all of a call's tensors to one device");
    }

    template <typename Name>
    void flat(const Name& name, const Tensor& t) const {
        same_device(name, t);
        if (t.dim() != 1 || !t.is_contiguous())
            fail(spell(name), " is ", describe(t),
                 ", but it must be 1-D and contiguous: pass t.view(-1) of a contiguous tensor");
        aligned(name, t);
    }

    // torch.frombuffer makes tensors that begin between two multiples of their elements' size.
    template <typename Name>
    void aligned(const Name& name, const Tensor& t) const {
        if (reinterpret_cast<uintptr_t>(t.data_ptr()) % t.element_size() != 0)
            fail(spell(name), " is ", describe(t),
                 ", at an address that is no multiple of its elements' ", t.element_size(),
                 " bytes: pass a copy");
    }

    template <typename Name>
    void numel(const Name& name, const Tensor& t, int64_t wanted) const {
        if (t.numel() != wanted)
            fail(spell(name), " has ", t.numel(), " elements, but must have ", wanted,
                 " as its companions");
    }

    template <typename Name>
    void type(const Name& name, const Tensor& t, ScalarType wanted) const {
        if (t.scalar_type() != wanted)
            fail(spell(name), " is ", describe(t), ", but its dtype must be ", name_of(wanted));
    }

    // A floating-point dtype that the launchers know.
    template <typename Name>
    Dtype dtype(const Name& name, const Tensor& t) const {
        switch (t.scalar_type()) {
            case ScalarType::Float:
                return Dtype::kFloat32;
            case ScalarType::BFloat16:
                return Dtype::kBfloat16;
            case ScalarType::Half:
                return Dtype::kFloat16;
            case ScalarType::Double:
                return Dtype::kFloat64;
            default:
                fail(spell(name), " is ", describe(t),
                     ", but its dtype must be float32, bfloat16, float16 or float64: convert it "
                     "first");
        }
    }

    // A flat tensor of `wanted` type and `rows` elements, or null.
    template <typename T>
    T* optional_flat(const char* name, const MaybeTensor& t, ScalarType wanted,
                     int64_t rows) const {
        if (!t.has_value()) return nullptr;
        flat(name, *t);
        type(name, *t, wanted);
        numel(name, *t, rows);
        return static_cast<T*>(t->data_ptr());
    }

    // A contiguous (rows, columns) matrix.
    template <typename T>
    const T* matrix(const char* name, const Tensor& t, ScalarType wanted, int64_t rows,
                    int64_t columns) const {
        same_device(name, t);
        type(name, t, wanted);
        if (t.dim() != 2 || t.size(0) != rows || t.size(1) != columns || !t.is_contiguous())
            fail(name, " is ", describe(t), ", but must be a contiguous tensor of shape (", rows,
                 ", ", columns, ")");
        return static_cast<const T*>(t.data_ptr());
    }

 private:
    static std::string spell(const char* name) { return name; }
    static std::string spell(const std::pair<const char*, size_t>& item) {
        return text(item.first, "[", item.second, "]");
    }
    static int64_t device_index(const Tensor& t) { return t.is_cpu() ? -1 : t.get_device_index(); }

    const char* op_;
    const Tensor& first_;
    int64_t device_;
};

// The peers' tensors: flat, of one dtype, `numel` elements each.
inline Rows peer_rows(const Checks& check, const char* name, const Tensors& peers, int64_t numel) {
    const auto count = static_cast<int64_t>(peers.size());
    check.require(count >= 1 && count <= kMaxPeers, name, " has ", count,
                  " tensors, but must have one for each rank, from 1 to ", kMaxPeers,
                  ": more ranks take the process group's collectives");
    Rows rows{.dtype = check.dtype(std::pair{name, size_t{0}}, peers[0]),
              .count = count,
              .base = nullptr,
              .stride = 0,
              .peers = {}};
    for (size_t i = 0; i < peers.size(); ++i) {
        const std::pair item{name, i};
        check.flat(item, peers[i]);
        check.type(item, peers[i], peers[0].scalar_type());
        check.numel(item, peers[i], numel);
        rows.peers[i] = peers[i].data_ptr();
    }
    return rows;
}

// Whether two runs of bytes have one in common; an empty one has none.
inline bool share_memory(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
    const auto *p = static_cast<const char*>(a), *q = static_cast<const char*>(b);
    return a_bytes > 0 && b_bytes > 0 && p < q + b_bytes && q < p + a_bytes;
}

// Whether two flat tensors have an element's memory in common.
inline bool share_memory(const Tensor& a, const Tensor& b) {
    const auto bytes = [](const Tensor& t) {
        return t.numel() * static_cast<int64_t>(t.element_size());
    };
    return share_memory(a.data_ptr(), bytes(a), b.data_ptr(), bytes(b));
}

// Refuses a tensor that lies where `other` is written; both are flat.
inline void refuse_shared(const Checks& check, const char* name, const Tensor& t,
                          const char* other_name, const Tensor& other) {
    check.require(!share_memory(t, other), name, " and ", other_name,
                  " share memory: pass a copy of one");
}

// Refuses tensors of a list that is read of which one lies where `other` is written; all are flat.
inline void refuse_shared(const Checks& check, const char* name, const Tensors& list,
                          const char* other_name, const Tensor& other) {
    for (size_t i = 0; i < list.size(); ++i)
        check.require(!share_memory(list[i], other), name, "[", i, "] and ", other_name,
                      " share memory: pass a copy of one");
}

// Where a tensor's elements lie, with the dimensions of size 1 dropped and those that are dense
// merged; more than kMaxDims of them left = nullopt.
inline std::optional<Strided> merge_dims(const Tensor& t) {
    Strided view{.dims = 0, .sizes = {}, .strides = {}};
    if (t.is_contiguous()) return view;
    const auto sizes = t.sizes(), strides = t.strides();
    for (int64_t d = 0; d < t.dim(); ++d) {
        if (sizes[d] == 1) continue;
        const int last = view.dims - 1;
        if (last >= 0 && view.strides[last] == sizes[d] * strides[d]) {
            view.sizes[last] *= sizes[d];
            view.strides[last] = strides[d];
            continue;
        }
        if (view.dims == kMaxDims) return std::nullopt;
        view.sizes[view.dims] = sizes[d];
        view.strides[view.dims++] = strides[d];
    }
    return view;
}

// Elements from the first to one behind the last that a view reaches.
inline int64_t extent(const Strided& view, int64_t numel) {
    if (view.dims == 0) return numel;
    int64_t last = 0;
    for (int d = 0; d < view.dims; ++d) last += (view.sizes[d] - 1) * view.strides[d];
    return last + 1;
}

// Whether two elements of a view may share a place: sorted by stride, a dimension does not step
// over those below it.
inline bool may_overlap(const Strided& view) {
    std::vector<std::pair<int64_t, int64_t>> dims;
    for (int d = 0; d < view.dims; ++d) dims.emplace_back(view.strides[d], view.sizes[d]);
    std::sort(dims.begin(), dims.end());
    int64_t reach = 1;
    for (const auto& [stride, size] : dims) {
        if (stride < reach) return true;
        reach = stride * (size - 1) + reach;
    }
    return false;
}

}  // namespace zshard
