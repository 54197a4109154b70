// The door of what an optimizer's step takes, adamw_, sgd_, reduce_adamw_ and clip_factor_: their
// tensors, checked, as the launchers take them.
#pragma once

#include <array>
#include <tuple>

#include "checks.h"

namespace zshard {

// One kind of state, a buffer for each shard.
struct StateList {
    const char* name;
    const Tensors& tensors;
    bool optional;  // [] is allowed
};

// Rows that a CPU can read before it acts: each inside its shard, none touching another.
// `ascending`: in the order in which they lie, too.
template <typename Rule>
void check_segments(const Checks& check, const OptimArgs<Rule>& args, bool ascending = false) {
    std::vector<Segment> rows(args.rows.segments, args.rows.segments + args.rows.num_segments);
    const auto shards = static_cast<int64_t>(args.shards.size());
    const auto spell = [](const Segment& s) {
        return text("[", s.shard, ", ", s.begin, ", ", s.end, "]");
    };
    for (const Segment& s : rows) {
        if (s.shard < 0 || s.shard >= shards)
            check.fail("segment ", spell(s), " names a shard outside [0, ", shards, ")");
        if (s.begin < 0 || s.begin > s.end || s.end > args.shards[s.shard].numel)
            check.fail("segment ", spell(s), " is no range of shard ", s.shard, ", which has ",
                       args.shards[s.shard].numel, " elements");
    }
    const auto before = [](const Segment& a, const Segment& b) {
        return std::tie(a.shard, a.begin, a.end) < std::tie(b.shard, b.begin, b.end);
    };
    const auto unordered = std::is_sorted_until(rows.begin(), rows.end(), before);
    if (ascending && unordered != rows.end())
        check.fail("segment ", spell(*unordered), " is behind ", spell(unordered[-1]),
                   ": give them in the order in which they lie in the shard");
    if (unordered != rows.end()) std::sort(rows.begin(), rows.end(), before);
    for (size_t g = 1; g < rows.size(); ++g)
        if (rows[g].shard == rows[g - 1].shard && rows[g].begin < rows[g - 1].end)
            check.fail("segments ", spell(rows[g - 1]), " and ", spell(rows[g]), " overlap");
}

// The tables, a row a segment, and the factors of the step.
template <typename Rule>
OptimRows<Rule> optim_rows(const Checks& check, const Tensor& segments, const Tensor& hypers,
                           const Tensor& steps, const MaybeTensor& active,
                           const MaybeTensor& grad_scale, const MaybeTensor& skip) {
    using Hyper = typename Rule::Hyper;
    const int64_t rows = segments.dim() > 0 ? segments.size(0) : -1;
    return {
        .num_segments = rows,
        .segments = check.matrix<Segment>("segments", segments, ScalarType::Long, rows, 3),
        .hypers = check.matrix<Hyper>("hypers", hypers, ScalarType::Double, rows,
                                      sizeof(Hyper) / sizeof(double)),
        .steps = check.optional_flat<int64_t>("steps", steps, ScalarType::Long, rows),
        .active = check.optional_flat<uint8_t>("active", active, ScalarType::Byte, rows),
        .grad_scale = check.optional_flat<float>("grad_scale", grad_scale, ScalarType::Float, 1),
        .skip = check.optional_flat<float>("skip", skip, ScalarType::Float, 1)};
}

// Of a master's low-precision copy. `both`: the low planes and the copy; `none`: a call without it.
inline Dtype send_dtype(const Checks& check, bool split, const Tensor& send, const char* both,
                        const char* subject, const char* none) {
    check.require(!split, both, " both given: a split master's upper plane is the send buffer, ",
                  "pass ", none);
    const ScalarType type = send.scalar_type();
    check.require(type == ScalarType::BFloat16 || type == ScalarType::Half, subject, " ",
                  name_of(type), ", but a send buffer is bfloat16 or float16: without a ",
                  "low-precision copy pass ", none);
    return type == ScalarType::Half ? Dtype::kFloat16 : Dtype::kBfloat16;
}

template <typename Rule>
OptimArgs<Rule> optim_args(const Checks& check, const std::array<StateList, Rule::kStates>& states,
                           const Tensors& masters, const Tensors& lows, const Tensors& grads,
                           const Tensors& sends, const Tensor& segments, const Tensor& hypers,
                           const Tensor& steps, const MaybeTensor& active,
                           const MaybeTensor& grad_scale, const MaybeTensor& skip) {
    const size_t shards = masters.size();
    const auto length = [&](const char* name, const Tensors& list, bool optional) {
        check.require(list.size() == shards || (optional && list.empty()), name, " has ",
                      list.size(), " entries but masters has ", shards, ": give one for each",
                      optional ? ", or none" : "");
    };
    length("lows", lows, true);
    for (const StateList& state : states) length(state.name, state.tensors, state.optional);
    length("grads", grads, false);
    length("sends", sends, true);
    const bool split = !lows.empty();
    OptimArgs<Rule> args{
        .shards = {},
        .grad_dtype = Dtype::kFloat32,
        .split = split,
        .has_send = !sends.empty(),
        .send_dtype = sends.empty() ? Dtype::kBfloat16
                                    : send_dtype(check, split, sends[0], "lows and sends are",
                                                 "sends are", "sends=[]"),
        .rows = optim_rows<Rule>(check, segments, hypers, steps, active, grad_scale, skip)};
    args.shards.reserve(shards);
    for (size_t i = 0; i < shards; ++i) {
        const int64_t numel = masters[i].numel();
        const auto pointer = [&](const char* name, const Tensors& list,
                                 ScalarType wanted) -> void* {
            if (list.empty()) return nullptr;
            const std::pair item{name, i};
            check.flat(item, list[i]);
            check.type(item, list[i], wanted);
            check.numel(item, list[i], numel);
            return list[i].data_ptr();
        };
        OptimShard<Rule> shard{
            .master = pointer("masters", masters, split ? ScalarType::BFloat16 : ScalarType::Float),
            .low = static_cast<int16_t*>(pointer("lows", lows, ScalarType::Short)),
            .states = {},
            .grad = pointer("grads", grads, grads[0].scalar_type()),
            .send = sends.empty() ? nullptr : pointer("sends", sends, sends[0].scalar_type()),
            .numel = numel};
        for (int s = 0; s < Rule::kStates; ++s)
            shard.states[s] =
                static_cast<float*>(pointer(states[s].name, states[s].tensors, ScalarType::Float));
        args.shards.push_back(shard);
    }
    if (shards > 0) args.grad_dtype = check.dtype("grads[0]", grads[0]);
    check.require(args.grad_dtype != Dtype::kFloat64,
                  "grads are float64, but the step runs in float32: cast them");
    if (segments.is_cpu()) check_segments(check, args);
    return args;
}

// The arguments of one shard whose gradient is yet to be summed from `peers`.
inline ReduceAdamwArgs reduce_adamw_args(const Checks& check, const Tensor& master,
                                         const MaybeTensor& low, const Tensor& exp_avg,
                                         const Tensor& exp_avg_sq, const Tensors& peers,
                                         const MaybeTensor& send, const OptimRows<Adamw>& rows) {
    const int64_t numel = master.numel();
    const bool split = low.has_value();
    const auto pointer = [&](const char* name, const MaybeTensor& t, ScalarType wanted) {
        void* data = check.optional_flat<void>(name, t, wanted, numel);
        if (data != nullptr) refuse_shared(check, "peers", peers, name, *t);
        return data;
    };
    ReduceAdamwArgs args{
        .optim = {.shards = {},
                  .grad_dtype = Dtype::kFloat32,
                  .split = split,
                  .has_send = send.has_value(),
                  .send_dtype = send ? send_dtype(check, split, *send, "low and send are",
                                                  "send is", "send=None")
                                     : Dtype::kBfloat16,
                  .rows = rows},
        .peers = peer_rows(check, "peers", peers, numel),
        .scale = 1.0,
        .stats = nullptr};
    args.optim.grad_dtype = args.peers.dtype;
    check.require(args.peers.dtype != Dtype::kFloat64,
                  "peers are float64, but the step runs in float32: cast them");
    const auto fp32 = ScalarType::Float;
    args.optim.shards.push_back(
        {.master = pointer("master", master, split ? ScalarType::BFloat16 : fp32),
         .low = static_cast<int16_t*>(pointer("low", low, ScalarType::Short)),
         .states = {static_cast<float*>(pointer("exp_avg", exp_avg, fp32)),
                    static_cast<float*>(pointer("exp_avg_sq", exp_avg_sq, fp32))},
         .grad = nullptr,
         .send = send ? pointer("send", send, send->scalar_type()) : nullptr,
         .numel = numel});
    if (master.is_cpu()) check_segments(check, args.optim, /*ascending=*/true);
    return args;
}

inline ClipArgs clip_args(const Checks& check, const Tensor& factor, const Tensor& norm,
                          const Tensor& squares, double max_norm, const MaybeTensor& scale) {
    const bool wide = factor.scalar_type() == ScalarType::Double;
    const ScalarType type = wide ? ScalarType::Double : ScalarType::Float;
    for (const auto& [name, t, wanted] :
         {std::tuple("factor", &factor, type), std::tuple("norm", &norm, type),
          std::tuple("squares", &squares, ScalarType::Double)}) {
        check.flat(name, *t);
        check.type(name, *t, wanted);
        check.numel(name, *t, 1);
    }
    const void* by = check.optional_flat<void>("scale", scale, type, 1);
    for (const auto& [name, t] : {std::tuple("factor", &factor), std::tuple("norm", &norm)}) {
        refuse_shared(check, "squares", squares, name, *t);
        if (scale) refuse_shared(check, "scale", *scale, name, *t);
    }
    refuse_shared(check, "norm", norm, "factor", factor);
    return {.factor = factor.data_ptr(),
            .norm = norm.data_ptr(),
            .scale = by,
            .dtype = wide ? Dtype::kFloat64 : Dtype::kFloat32,
            .squares = static_cast<const double*>(squares.data_ptr()),
            .max_norm = max_norm};
}

}  // namespace zshard
