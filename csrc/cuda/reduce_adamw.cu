#include <optional>

#include "cuda/optim.cuh"
#include "cuda/reduce.cuh"

namespace zshard::cuda {

namespace {

using Rule = Adamw;

struct Operands {
    Rows peers;
    double scale;
    OptimShard<Rule> shard;
    OptimRows<Rule> rows;
};

// Updates elements [begin, end) as far as there are segments; their gradient starts at `gradient`.
template <bool kSplit, typename Send>
__device__ void update_block(const Operands& args, const Plan<Rule>& plan, int64_t begin,
                             int64_t end, const float* gradient) {
    const OptimRows<Rule>& rows = args.rows;
    const float scale = rows.grad_scale != nullptr ? *rows.grad_scale : 1.0f;
    int64_t g =
        last_not_after(rows.num_segments, begin, [&](int64_t i) { return rows.segments[i].begin; });
    for (; g < rows.num_segments; ++g) {
        const int64_t first = max(rows.segments[g].begin, begin);
        const int64_t last = min(rows.segments[g].end, end);
        if (first >= end) return;
        // A segment without tiles takes no part in this step.
        if (first >= last || plan.first_tile[g] == plan.first_tile[g + 1]) continue;
        const typename Rule::Factors factors = plan.factors[g];
        Buffers<Rule, kSplit, float, Send> buffers(args.shard, first);
        buffers.grad = gradient + (first - begin);
        if (Rule::branch(factors)) {
            buffers.template update_run<true>(last - first, scale, factors);
        } else {
            buffers.template update_run<false>(last - first, scale, factors);
        }
    }
}

// Blocks that a multiprocessor is to hold at a time: a block waits between its sum and its update,
// and meanwhile the others keep the memory busy.
constexpr int kReduceAdamwBlocks = 3;

// A block's gradient goes from its sum to its update through shared memory.
// aligned: every peer begins at a whole vector.
// partials: one for each block of kSquareBlock elements, or null.
template <bool kSplit, typename Peer, typename Send>
__global__ void __launch_bounds__(kThreads, kReduceAdamwBlocks)
    reduce_adamw_kernel(const __grid_constant__ Operands args, Plan<Rule> plan, bool aligned,
                        Partial* partials) {
    __shared__ Vector<float, kSquareGroup> gradient[kSquareBlock / kSquareGroup];
    await_predecessor();
    if (partials != nullptr) let_follow();
    const int64_t numel = args.shard.numel;
    const int64_t begin = blockIdx.x * int64_t{kSquareBlock};
    const auto put = [&](int row, const Vector<float, kSquareGroup>& group) {
        gradient[place(row) / kSquareGroup] = group;
    };
    const auto reduce = [&](auto kWhole) {
        return reduce_block<kWhole, float, Peer>(args.peers, begin, numel, args.scale, nullptr,
                                                 put);
    };
    const int64_t end = min(begin + kSquareBlock, numel);
    const Partial mine = aligned && end - begin == kSquareBlock ? reduce(std::true_type{})
                                                                : reduce(std::false_type{});
    __syncthreads();
    update_block<kSplit, Send>(args, plan, begin, end, gradient[0].values);
    record(mine, partials);
}

}  // namespace

void reduce_adamw(const ReduceAdamwArgs& args) {
    constexpr const char* kOp = "reduce_adamw_";
    const Operands operands{.peers = args.peers,
                            .scale = args.scale,
                            .shard = args.optim.shards[0],
                            .rows = args.optim.rows};
    const int64_t rows = operands.rows.num_segments, numel = operands.shard.numel;
    const int64_t blocks = square_blocks(numel);
    const Scratch scratch(plan_bytes<Rule>(rows));
    const Plan<Rule> plan = make_plan(kOp, operands.rows, 1, numel, scratch);
    std::optional<Scratch> measured;
    if (args.stats != nullptr) measured.emplace(blocks * int64_t{sizeof(Partial)});
    auto* partials = measured ? measured->as<Partial>() : nullptr;
    if (blocks > 0)
        dispatch_optim(args.optim, [&](auto peer, auto send, auto split) {
            using Peer = decltype(peer);
            using Send = typename decltype(send)::type;
            bool aligned = true;
            for (int64_t rank = 0; rank < args.peers.count; ++rank)
                aligned &= is_aligned<kSquareGroup>(args.peers.row<Peer>(rank));
            launch(kOp, Order::kFollowing, reduce_adamw_kernel<decltype(split)::value, Peer, Send>,
                   static_cast<unsigned>(blocks), kThreads, operands, plan, aligned, partials);
        });
    if (args.stats != nullptr) finish_stats(kOp, partials, blocks, args.stats);
}

}  // namespace zshard::cuda
