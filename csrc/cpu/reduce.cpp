#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/isa.h"
#include "cpu/memory.h"
#include "ops.h"

namespace zshard::cpu {

namespace {

constexpr int64_t kRow = kSquareColumns * kSquareGroup;

// What a thread needs for a block of at most kSquareBlock elements, in its first-level cache.
template <typename Acc>
struct Block {
    alignas(kLine) Wide<Acc> wide[kSquareBlock];  // sums of all chunks but the last two
    alignas(kLine) double squares[kRow];          // of the stored values, the rows added
};

// A block's sum of squares in the order of [Note: sum of squares], from the sums of its rows.
double square_sum(double* sums) {
    static_assert(kSquareGroup == 4);
    vectorised([sums] {
        for (int c = 0; c < kSquareColumns; ++c) {
            const double* g = sums + c * kSquareGroup;
            sums[c] = (g[0] + g[2]) + (g[1] + g[3]);
        }
        for (int half = kSquareColumns / 2; half > 0; half /= 2)
            each(0, half, [&](int64_t i) { sums[i] += sums[half + i]; });
    });
    return sums[0];
}

// The blocks' sums in the order of [Note: sum of squares].
double lane_sum(const std::vector<double>& blocks) {
    double lanes[kSquareLanes] = {};
    for (size_t i = 0; i < blocks.size(); ++i) lanes[i % kSquareLanes] += blocks[i];
    for (int half = kSquareLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[half + i];
    return lanes[0];
}

// The last one or two chunks, the scale, the store and the squares in one loop: for two ranks this
// is all there is, and the arithmetic hides behind the memory. Of one chunk `second` is not read.
template <typename Acc, typename Chunk, int kChunks, bool kSummed, bool kAccumulate>
void finish_block(Block<Acc>& block, const Chunk* first, const Chunk* second, Acc* acc,
                  int64_t count, Wide<Acc> scale, bool stream) {
    using W = Wide<Acc>;
    std::fill_n(block.squares, kRow, 0.0);
    vectorised([=, wide = block.wide, squares = block.squares] {
        const auto value_at = [=](int64_t i) {
            W sum = kSummed ? wide[i] + convert<W>(first[i]) : convert<W>(first[i]);
            if constexpr (kChunks == 2) sum += convert<W>(second[i]);
            sum *= scale;
            return convert<Acc>(kAccumulate ? convert<W>(acc[i]) + sum : sum);
        };
        const int64_t tail = count - count % kStep;
        for (int64_t i = 0; i < tail; i += kStep) {
            prefetch<kStep>(first + i);
            if constexpr (kChunks == 2) prefetch<kStep>(second + i);
            if (!stream) prefetch<kStep>(acc + i);
            alignas(kLine) Acc step[kStep];
            each(0, kStep, [&](int64_t k) { step[k] = value_at(i + k); });
            double* row = squares + i % kRow;
            each(0, kStep, [&](int64_t k) {
                const double x = convert<W>(step[k]);
                row[k] += x * x;
            });
            store_step(acc + i, step, stream);
        }
        for (int64_t i = tail; i < count; ++i) {
            acc[i] = value_at(i);
            const double x = convert<W>(acc[i]);
            squares[i % kRow] += x * x;
        }
    });
}

// Elements [begin, begin + count). Leaves their squares in block.squares.
template <typename Acc, typename Chunk>
void reduce_block(const ReduceArgs& args, int64_t begin, int64_t count, bool stream,
                  Block<Acc>& block) {
    using W = Wide<Acc>;
    const Rows& chunks = args.chunks;
    const int64_t early = chunks.count - 2;
    if (early > 0) {
        vectorised([=, &chunks, wide = block.wide] {
            for (int64_t rank = 0; rank < early; ++rank) {
                const Chunk* chunk = chunks.row<Chunk>(rank) + begin;
                for (int64_t i = 0; i < count; i += kStep) {
                    prefetch<kStep>(chunk + i);
                    const int64_t end = std::min(i + kStep, count);
                    if (rank == 0) {
                        each(i, end, [=](int64_t k) { wide[k] = convert<W>(chunk[k]); });
                    } else {
                        each(i, end, [=](int64_t k) { wide[k] += convert<W>(chunk[k]); });
                    }
                }
            }
        });
    }
    const auto finish = [&](auto kChunks, auto kSummed, auto kAccumulate) {
        finish_block<Acc, Chunk, kChunks, kSummed, kAccumulate>(
            block, chunks.row<Chunk>(chunks.count - kChunks) + begin,
            chunks.row<Chunk>(chunks.count - 1) + begin, static_cast<Acc*>(args.acc) + begin, count,
            static_cast<W>(args.scale), stream);
    };
    const auto finish_as = [&](auto kAccumulate) {
        using One = std::integral_constant<int, 1>;
        using Two = std::integral_constant<int, 2>;
        if (early > 0) return finish(Two{}, std::true_type{}, kAccumulate);
        if (early == 0) return finish(Two{}, std::false_type{}, kAccumulate);
        finish(One{}, std::false_type{}, kAccumulate);
    };
    args.accumulate ? finish_as(std::true_type{}) : finish_as(std::false_type{});
}

template <typename Acc, typename Chunk>
void reduce_typed(const ReduceArgs& args) {
    const int64_t blocks = (args.numel + kSquareBlock - 1) / kSquareBlock;
    auto* acc = static_cast<Acc*>(args.acc);
    // Accumulating reads acc into the cache anyway.
    const bool stream = !args.accumulate && to_next_line(acc) == 0 &&
                        args.numel * int64_t{sizeof(Acc)} >= kStreamBytes;
    std::vector<double> sums(args.stats != nullptr ? blocks : 0);
    std::vector<uint8_t> bad(sums.size());
    parallel(blocks, kGrain / kSquareBlock, [&](int64_t first, int64_t last) {
        Block<Acc> block;
        for (int64_t b = first; b < last; ++b) {
            const int64_t begin = b * kSquareBlock;
            const int64_t count = std::min<int64_t>(kSquareBlock, args.numel - begin);
            reduce_block<Acc, Chunk>(args, begin, count, stream, block);
            if (args.stats == nullptr) continue;
            sums[b] = square_sum(block.squares);
            bad[b] = !std::isfinite(sums[b]);
            // A float's square cannot overflow a double, but a double's can.
            if (std::is_same_v<Acc, double> && bad[b] != 0)
                bad[b] = !std::all_of(acc + begin, acc + begin + count,
                                      [](Acc x) { return std::isfinite(convert<Wide<Acc>>(x)); });
        }
        stream_fence();
    });
    if (args.stats == nullptr) return;
    args.stats[0] = lane_sum(sums);
    args.stats[1] =
        std::any_of(bad.begin(), bad.end(), [](uint8_t b) { return b != 0; }) ? 1.0 : 0.0;
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
