#include <memory>

#include "cpu/optim.h"
#include "cpu/reduce.h"

namespace zshard::cpu {

namespace {

// Blocks whose gradients a thread sums before it uses them, 256 KiB: they stay in its second-level
// cache, and what is read of each rank and of each state comes in runs that the processor's
// prefetchers follow. A block at a time took 1.2 times as long (Zen 4).
constexpr int64_t kRun = 16;

// The buffers of `shard` from element `at` on.
template <typename Rule, bool kSplit, typename Send>
OptimShard<Rule> from(const OptimShard<Rule>& shard, int64_t at, const float* grad) {
    using Master = std::conditional_t<kSplit, Bf16, float>;
    OptimShard<Rule> rest = shard;
    rest.master = static_cast<Master*>(shard.master) + at;
    if constexpr (kSplit) rest.low += at;
    for (float*& state : rest.states) state += at;
    rest.grad = grad;
    if constexpr (!std::is_void_v<Send>) rest.send = static_cast<Send*>(shard.send) + at;
    rest.numel -= at;
    return rest;
}

}  // namespace

// The gradient of a run stays in the thread's cache between its sum and its use.
void reduce_adamw(const ReduceAdamwArgs& args) {
    using Rule = Adamw;
    const OptimShard<Rule>& shard = args.optim.shards[0];
    const OptimRows<Rule>& rows = args.optim.rows;
    const std::vector<Work<Rule>> work = take_step(rows);
    if (work.empty() && args.stats == nullptr) return;
    const float grad_scale = rows.grad_scale != nullptr ? *rows.grad_scale : 1.0f;
    const int64_t blocks = square_blocks(shard.numel);
    Stats stats(args.stats, blocks);
    dispatch_optim(args.optim, [&](auto peer, auto send, auto split) {
        using Peer = decltype(peer);
        using Send = typename decltype(send)::type;
        constexpr bool kSplit = decltype(split)::value;
        const bool stream = args.optim.has_send && shard.numel * 2 >= kStreamBytes;
        parallel(blocks, kGrain / kSquareBlock, [&](int64_t low, int64_t high) {
            const auto ends_after = [](int64_t at, const auto& item) {
                return at < item.segment.end;
            };
            auto item = std::upper_bound(work.begin(), work.end(), low * kSquareBlock, ends_after);
            Block<float> block;
            const auto grad =
                std::make_unique_for_overwrite<float[]>(std::min(kRun, high - low) * kSquareBlock);
            for (int64_t run = low; run < high; run += kRun) {
                const int64_t begin = run * kSquareBlock;
                const int64_t end =
                    std::min(std::min(run + kRun, high) * kSquareBlock, shard.numel);
                for (int64_t at = begin; at < end; at += kSquareBlock) {
                    const int64_t count = std::min<int64_t>(kSquareBlock, end - at);
                    float* acc = grad.get() + (at - begin);
                    reduce_block<float, Peer>(args.peers, at, count, acc, args.scale, false, false,
                                              block);
                    stats.add(at / kSquareBlock, block, acc, count);
                }
                const auto here = from<Rule, kSplit, Send>(shard, begin, grad.get());
                for (; item != work.end() && item->segment.begin < end; ++item) {
                    const auto update = Rule::branch(item->factors)
                                            ? update_range<Rule, true, kSplit, float, Send>
                                            : update_range<Rule, false, kSplit, float, Send>;
                    update(here, std::max(item->segment.begin, begin) - begin,
                           std::min(item->segment.end, end) - begin, grad_scale, item->factors,
                           stream);
                    if (item->segment.end > end) break;  // the next run goes on with it
                }
            }
            if (stream) stream_fence();
        });
    });
    stats.write();
}

}  // namespace zshard::cpu
