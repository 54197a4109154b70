#include "cpu/reduce.h"

namespace zshard::cpu {

namespace {

template <typename Acc, typename Chunk>
void reduce_typed(const ReduceArgs& args) {
    const int64_t blocks = (args.numel + kSquareBlock - 1) / kSquareBlock;
    auto* acc = static_cast<Acc*>(args.acc);
    // Accumulating reads acc into the cache anyway.
    const bool stream = !args.accumulate && to_next_line(acc) == 0 &&
                        args.numel * int64_t{sizeof(Acc)} >= kStreamBytes;
    Stats stats(args.stats, blocks);
    parallel(blocks, kGrain / kSquareBlock, [&](int64_t first, int64_t last) {
        Block<Acc> block;
        for (int64_t b = first; b < last; ++b) {
            const int64_t begin = b * kSquareBlock;
            const int64_t count = std::min<int64_t>(kSquareBlock, args.numel - begin);
            reduce_block<Acc, Chunk>(args.chunks, begin, count, acc + begin, args.scale,
                                     args.accumulate, stream, block);
            stats.add(b, block, acc + begin, count);
        }
        stream_fence();
    });
    stats.write();
}

}  // namespace

void reduce(const ReduceArgs& args) {
    if (args.acc_dtype == Dtype::kFloat64) return reduce_typed<double, double>(args);
    dispatch(args.acc_dtype, [&](auto acc) {
        dispatch(args.chunks.dtype,
                 [&](auto chunk) { reduce_typed<decltype(acc), decltype(chunk)>(args); });
    });
}

}  // namespace zshard::cpu
