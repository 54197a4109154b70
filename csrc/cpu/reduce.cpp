#include "cpu/reduce.h"

namespace zshard::cpu {

namespace {

// The squares of a block that is not written, its rows added. In a whole block the rows are read
// side by side, which spares each sum a way through memory but loses the processor's prefetchers:
// the next block is asked for here.
template <typename T>
void square_block(const T* x, int64_t count, double* squares) {
    static_assert(kSquareRows == 4);
    vectorised([=](auto) {
        const auto square = [=](int64_t i) {
            const double value = convert<Wide<T>>(x[i]);
            return value * value;
        };
        if (count < kSquareBlock) {
            std::fill_n(squares, kRow, 0.0);
            for (int64_t row = 0; row < count; row += kRow)
                each(0, std::min(kRow, count - row),
                     [=](int64_t i) { squares[i] += square(row + i); });
            return;
        }
        for (int64_t at = 0; at < kRow; at += kStep) {
            const T* next = x + kSquareBlock + at * kSquareRows;
            constexpr int64_t kPerLine = kLine / int64_t{sizeof(T)};
            for (int64_t i = 0; i < kStep * kSquareRows; i += kPerLine)
                __builtin_prefetch(next + i, 0, 2);
            each(at, at + kStep, [=](int64_t i) {
                squares[i] =
                    ((square(i) + square(kRow + i)) + square(2 * kRow + i)) + square(3 * kRow + i);
            });
        }
    });
}

// Calls f(block, begin, count) for the elements [begin, begin + count) of acc that each block has,
// and takes in the squares that it leaves there.
template <typename Acc, typename F>
void for_blocks(const ReduceArgs& args, const F& f) {
    const int64_t blocks = square_blocks(args.numel);
    const auto* acc = static_cast<const Acc*>(args.acc);
    Stats stats(args.stats, blocks);
    parallel(blocks, kGrain / kSquareBlock, [&](int64_t first, int64_t last) {
        Block<Acc> block;
        for (int64_t b = first; b < last; ++b) {
            const int64_t begin = b * kSquareBlock;
            const int64_t count = std::min<int64_t>(kSquareBlock, args.numel - begin);
            f(block, begin, count);
            stats.add(b, block, acc + begin, count);
        }
        stream_fence();
    });
    stats.write();
}

template <typename T>
void measure_typed(const ReduceArgs& args) {
    const auto* x = static_cast<const T*>(args.acc);
    for_blocks<T>(args, [&](Block<T>& block, int64_t begin, int64_t count) {
        square_block(x + begin, count, block.squares);
    });
}

template <typename Acc, typename Chunk>
void reduce_typed(const ReduceArgs& args) {
    auto* acc = static_cast<Acc*>(args.acc);
    // Accumulating reads acc into the cache anyway.
    const bool stream = !args.accumulate && to_next_line(acc) == 0 &&
                        args.numel * int64_t{sizeof(Acc)} >= kStreamBytes;
    for_blocks<Acc>(args, [&](Block<Acc>& block, int64_t begin, int64_t count) {
        reduce_block<Acc, Chunk>(args.chunks, begin, count, acc + begin, args.scale,
                                 args.accumulate, stream, block);
    });
}

}  // namespace

void reduce(const ReduceArgs& args) {
    if (args.in_place) {
        if (args.stats == nullptr) return;
        if (args.acc_dtype == Dtype::kFloat64) return measure_typed<double>(args);
        return dispatch(args.acc_dtype, [&](auto x) { measure_typed<decltype(x)>(args); });
    }
    dispatch_pair(args.acc_dtype, args.chunks.dtype, [&](auto acc, auto chunk) {
        reduce_typed<decltype(acc), decltype(chunk)>(args);
    });
}

}  // namespace zshard::cpu
