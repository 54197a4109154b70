// What the checks in ops.cpp hand to the launchers in cpu/ and cuda/: plain structs, already valid.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "formulas.h"

namespace zshard {

enum class Dtype : int32_t { kFloat32, kBfloat16, kFloat16, kFloat64 };

inline constexpr int64_t size_of(Dtype dtype) {
    return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}

// Calls f with a value of the C++ type that stores `dtype`: float, Bf16 or Fp16.
template <typename F>
decltype(auto) dispatch(Dtype dtype, const F& f) {
    switch (dtype) {
        case Dtype::kBfloat16:
            return f(Bf16{});
        case Dtype::kFloat16:
            return f(Fp16{});
        default:
            return f(float{});
    }
}

// Calls f with values of both C++ types of a conversion, one that cast_ allows.
template <typename F>
void dispatch_cast(Dtype to, Dtype from, const F& f) {
    if (to == Dtype::kFloat64)
        return from == Dtype::kFloat64 ? f(double{}, double{}) : f(double{}, float{});
    if (from == Dtype::kFloat64) return f(float{}, double{});
    dispatch(to, [&](auto t) { dispatch(from, [&](auto s) { f(t, s); }); });
}

// The same of a pair that pack_ or reduce_ allows: float64 goes only with float64.
template <typename F>
void dispatch_pair(Dtype one, Dtype other, const F& f) {
    if (one == Dtype::kFloat64) return f(double{}, double{});
    dispatch(one, [&](auto a) { dispatch(other, [&](auto b) { f(a, b); }); });
}

// Most ranks whose memory one call reads. Their addresses travel in a kernel's arguments: 1,024 of
// the 4,096 bytes that any GPU takes, for more ranks than share a host.
inline constexpr int64_t kMaxPeers = 128;

// As many elements of each rank, in rank order: the rows of one tensor, any number of them, or up
// to kMaxPeers tensors, each wherever it lies.
struct Rows {
    Dtype dtype;
    int64_t count;
    const void* base;  // null: they lie where `peers` says
    int64_t stride;    // elements from one row of base to the next
    const void* peers[kMaxPeers];

    template <typename T>
    ZSHARD_HD const T* row(int64_t rank) const {
        if (base != nullptr) return static_cast<const T*>(base) + rank * stride;
        return static_cast<const T*>(peers[rank]);
    }
};

// Strides of a tensor whose dimensions that lie densely behind one another are merged.
inline constexpr int kMaxDims = 8;
struct Strided {
    int32_t dims;  // 0 = contiguous
    int64_t sizes[kMaxDims];
    int64_t strides[kMaxDims];  // elements
};

// One tensor's place in a flat buffer: elements [offset, offset + numel).
struct Piece {
    void* data;  // null: nothing there, the flat elements are zeroed
    Dtype dtype;
    int64_t offset;
    int64_t numel;
    Strided strided;
};

// pack_ (pieces -> flat; pieces cover all of flat) and unpack_ (flat -> pieces). Pieces ascend.
struct PackArgs {
    void* flat;
    Dtype dtype;
    int64_t numel;
    double scale;
    std::vector<Piece> pieces;
};

// cast_, of one row, and gather_cast_.
struct CastArgs {
    void* out;  // (src.count * numel,)
    Dtype out_dtype;
    Rows src;       // (numel,) each; null: that part of out is in place already
    int64_t numel;  // of a row
};

struct MasterArgs {
    float* full;
    Bf16* hi;
    int16_t* lo;
    int64_t numel;
};

// reduce_ and reduce_peers_.
struct ReduceArgs {
    void* acc;
    Dtype acc_dtype;
    Rows chunks;  // (numel,) each
    int64_t numel;
    double scale;
    bool accumulate;
    bool in_place;  // acc is the only row, and stays as it is
    double* stats;  // null or (2,): sum of squares, 1 where a stored value is not finite
};

// clip_factor_: factor, norm and scale are of `dtype`, float32 or float64.
struct ClipArgs {
    void* factor;
    void* norm;
    const void* scale;  // null: 1
    Dtype dtype;
    const double* squares;
    double max_norm;

    template <typename T>
    ZSHARD_HD void run() const {
        const double by = scale == nullptr ? 1.0 : double{*static_cast<const T*>(scale)};
        const T found = static_cast<T>(sqrt(*squares * (by * by)));
        *static_cast<T*>(norm) = found;
        *static_cast<T*>(factor) = clip_factor(found, static_cast<T>(max_norm));
    }
};

// One shard's flat buffers, all of `numel` elements, for an optimizer's rule: [Note: optimizer
// rules].
template <typename Rule>
struct OptimShard {
    void* master;                  // float, or Bf16 upper plane where low is set
    int16_t* low;                  // null: fp32 master
    float* states[Rule::kStates];  // null: no segment uses it
    const void* grad;
    void* send;  // null: none
    int64_t numel;
};

// A row of `segments`: elements [begin, end) of shard number `shard`.
struct Segment {
    int64_t shard, begin, end;
};

// What is known of each segment, and of the step: in memory of the shards' device.
template <typename Rule>
struct OptimRows {
    int64_t num_segments;
    const Segment* segments;  // (num_segments,), as the four below
    const typename Rule::Hyper* hypers;
    int64_t* steps;
    const uint8_t* active;    // null: all
    const float* grad_scale;  // null or (1,)
    const float* skip;        // null or (1,), nonzero = change nothing
};

template <typename Rule>
struct OptimArgs {
    std::vector<OptimShard<Rule>> shards;
    Dtype grad_dtype;
    bool split;     // masters are two planes
    bool has_send;  // each shard has a send buffer (null where the shard is empty)
    Dtype send_dtype;
    OptimRows<Rule> rows;
};

// reduce_adamw_: the gradient of the only shard is nowhere stored; it is the scaled sum of the
// peers' rows. The segments ascend.
struct ReduceAdamwArgs {
    OptimArgs<Adamw> optim;  // its grad_dtype is that of the peers
    Rows peers;              // (numel,) each
    double scale;
    double* stats;  // as in ReduceArgs, of the gradient
};

// Calls f with a value of each type that an optimizer's call is compiled for: gradient, send buffer
// (void* = none) and whether the master is split.
template <typename Rule, typename F>
void dispatch_optim(const OptimArgs<Rule>& args, const F& f) {
    dispatch(args.grad_dtype, [&](auto grad) {
        if (args.split) return f(grad, std::type_identity<void>{}, std::true_type{});
        if (!args.has_send) return f(grad, std::type_identity<void>{}, std::false_type{});
        if (args.send_dtype == Dtype::kBfloat16)
            return f(grad, std::type_identity<Bf16>{}, std::false_type{});
        f(grad, std::type_identity<Fp16>{}, std::false_type{});
    });
}

namespace cpu {
void pack(const PackArgs& args);
void unpack(const PackArgs& args);
void cast(const CastArgs& args);
void split_master(const MasterArgs& args);
void join_master(const MasterArgs& args);
void reduce(const ReduceArgs& args);
void clip_factor(const ClipArgs& args);
void adamw(const OptimArgs<Adamw>& args);
void reduce_adamw(const ReduceAdamwArgs& args);
void sgd(const OptimArgs<Sgd>& args);
}  // namespace cpu

// The tensors' device is current; the work goes on its current stream.
namespace cuda {
void pack(const PackArgs& args);
void unpack(const PackArgs& args);
void cast(const CastArgs& args);
void split_master(const MasterArgs& args);
void join_master(const MasterArgs& args);
void reduce(const ReduceArgs& args);
void clip_factor(const ClipArgs& args);
void adamw(const OptimArgs<Adamw>& args);
void reduce_adamw(const ReduceAdamwArgs& args);
void sgd(const OptimArgs<Sgd>& args);
}  // namespace cuda

}  // namespace zshard
