// The loop of every optimizer's step: segments of shards, dealt to threads; [Note: optimizer
// rules].
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "cpu/isa.h"
#include "cpu/memory.h"
#include "ops.h"

namespace zshard::cpu {

// A segment that takes part in this step.
template <typename Rule>
struct Work {
    int64_t start;  // elements of all work before it
    Segment segment;
    typename Rule::Factors factors;
};

// Elements [begin, end) of a shard. `stream`: the send buffer is large, store around the cache.
template <typename Rule, bool kBranch, bool kSplit, typename Grad, typename Send>
void update_range(const OptimShard<Rule>& shard, int64_t begin, int64_t end, float scale,
                  const typename Rule::Factors& factors, bool stream) {
    using Master = std::conditional_t<kSplit, Bf16, float>;
    using Copy = std::conditional_t<std::is_void_v<Send>, Bf16, Send>;
    auto* master = static_cast<Master*>(shard.master);
    auto* low = shard.low;
    const auto states = std::to_array(shard.states);
    const auto* grad = static_cast<const Grad*>(shard.grad);
    auto* send = static_cast<Copy*>(shard.send);
    vectorised([=](auto isa) {
        constexpr int kUsed = Rule::used(kBranch);
        const typename Rule::Factors c = factors;
        const auto update = [=](int64_t i) {
            float p, values[Rule::kStates];
            if constexpr (kSplit) {
                p = zshard::join_master({master[i], low[i]});
            } else {
                p = master[i];
            }
            for (int s = 0; s < kUsed; ++s) values[s] = states[s][i];
            Rule::template update<kBranch>(to_float(grad[i]) * scale, p, values, c);
            for (int s = 0; s < kUsed; ++s) states[s][i] = values[s];
            if constexpr (kSplit) {
                const SplitMaster planes = zshard::split_master(p);
                master[i] = planes.hi;
                low[i] = planes.lo;
            } else {
                master[i] = p;
            }
            return p;
        };
        const auto update_run = [=](int64_t first, int64_t last) {
            each(first, last, [=](int64_t i) {
                const float p = update(i);
                if constexpr (!std::is_void_v<Send>) send[i] = from_float<Send>(p);
            });
        };
        int64_t i = begin;
        if constexpr (!std::is_void_v<Send>) {
            i = std::min(end, begin + to_next_line(send + begin) / int64_t{sizeof(Send)});
            update_run(begin, i);
        }
        for (; i + kStep <= end; i += kStep) {
            prefetch<kStep>(master + i);
            if constexpr (kSplit) prefetch<kStep>(low + i);
            for (int s = 0; s < kUsed; ++s) prefetch<kStep>(states[s] + i);
            prefetch<kStep>(grad + i);
            if constexpr (std::is_void_v<Send>) {
                update_run(i, i + kStep);
            } else {
                alignas(kLine) Send step[kStep];
                each(0, kStep, [&](int64_t k) { step[k] = from_float<Send>(update(i + k)); });
                store_step<isa.value>(send + i, step, stream);
            }
        }
        update_run(i, end);
    });
}

// The segments to update, their steps counted.
template <typename Rule>
std::vector<Work<Rule>> take_step(const OptimRows<Rule>& rows) {
    std::vector<Work<Rule>> work;
    if (rows.skip != nullptr && *rows.skip != 0.0f) return work;
    work.reserve(rows.num_segments);
    int64_t start = 0;
    for (int64_t g = 0; g < rows.num_segments; ++g) {
        if (rows.active != nullptr && rows.active[g] == 0) continue;
        const Segment& segment = rows.segments[g];
        work.push_back({start, segment, Rule::factors(rows.hypers[g], ++rows.steps[g])});
        start += segment.end - segment.begin;
    }
    return work;
}

template <typename Rule>
void optim_step(const OptimArgs<Rule>& args) {
    const std::vector<Work<Rule>> work = take_step(args.rows);
    if (work.empty()) return;
    const int64_t total = work.back().start + work.back().segment.end - work.back().segment.begin;
    const float scale = args.rows.grad_scale != nullptr ? *args.rows.grad_scale : 1.0f;
    dispatch_optim(args, [&](auto grad, auto send, auto split) {
        using Grad = decltype(grad);
        using Send = typename decltype(send)::type;
        constexpr bool kSplit = decltype(split)::value;
        const bool stream = args.has_send && total * 2 >= kStreamBytes;
        parallel(total, kGrain, [&](int64_t low, int64_t high) {
            const auto starts_after = [](int64_t at, const auto& item) { return at < item.start; };
            auto item = std::upper_bound(work.begin(), work.end(), low, starts_after) - 1;
            for (; item != work.end() && item->start < high; ++item) {
                const auto [shard, begin, end] = item->segment;
                const int64_t first = begin + std::max<int64_t>(low - item->start, 0);
                const int64_t last = std::min(begin + high - item->start, end);
                const auto update = Rule::branch(item->factors)
                                        ? update_range<Rule, true, kSplit, Grad, Send>
                                        : update_range<Rule, false, kSplit, Grad, Send>;
                update(args.shards[shard], first, last, scale, item->factors, stream);
            }
            if (stream) stream_fence();
        });
    });
}

}  // namespace zshard::cpu
