// The sum of the ranks' rows, a block at a time: shared by reduce and reduce_adamw.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/isa.h"
#include "cpu/memory.h"
#include "ops.h"

namespace zshard::cpu {

inline constexpr int64_t kRow = kSquareColumns * kSquareGroup;

// What a thread needs for a block of at most kSquareBlock elements, in its first-level cache.
template <typename Acc>
struct Block {
    alignas(kLine) Wide<Acc> wide[kSquareBlock];  // sums of all chunks but the last two
    alignas(kLine) double squares[kRow];          // of the stored values, the rows added
};

// A block's sum of squares in the order of [Note: sum of squares], from the sums of its rows.
inline double square_sum(double* sums) {
    static_assert(kSquareGroup == 4);
    vectorised([sums](auto) {
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
inline double lane_sum(const std::vector<double>& blocks) {
    double lanes[kSquareLanes] = {};
    for (size_t i = 0; i < blocks.size(); ++i) lanes[i % kSquareLanes] += blocks[i];
    for (int half = kSquareLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[half + i];
    return lanes[0];
}

// sum + x * x. A float's square is exact in a double, so a fused multiplication gives the same
// bits; where the processor has none, it would be a call.
template <Isa kIsa, typename Acc>
[[gnu::always_inline]] inline double add_square(double sum, double x) {
    if constexpr (kIsa >= Isa::kV3 && !std::is_same_v<Acc, double>) return std::fma(x, x, sum);
    return sum + x * x;
}

// The last one or two chunks, the scale, the store and the squares in one loop: for two ranks this
// is all there is, and the arithmetic hides behind the memory. Of one chunk `second` is not read.
template <typename Acc, typename Chunk, int kChunks, bool kSummed, bool kAccumulate>
void finish_block(Block<Acc>& block, const Chunk* first, const Chunk* second, Acc* acc,
                  int64_t count, Wide<Acc> scale, bool stream) {
    using W = Wide<Acc>;
    std::fill_n(block.squares, kRow, 0.0);
    vectorised([=, wide = block.wide, squares = block.squares](auto isa) {
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
                row[k] = add_square<isa.value, Acc>(row[k], x);
            });
            store_step<isa.value>(acc + i, step, stream);
        }
        for (int64_t i = tail; i < count; ++i) {
            acc[i] = value_at(i);
            const double x = convert<W>(acc[i]);
            squares[i % kRow] += x * x;
        }
    });
}

// The rows' elements [begin, begin + count) into acc. Leaves their squares in block.squares.
template <typename Acc, typename Chunk>
void reduce_block(const Rows& chunks, int64_t begin, int64_t count, Acc* acc, double scale,
                  bool accumulate, bool stream, Block<Acc>& block) {
    using W = Wide<Acc>;
    const int64_t early = chunks.count - 2;
    if (early > 0) {
        vectorised([=, &chunks, wide = block.wide](auto) {
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
            chunks.row<Chunk>(chunks.count - 1) + begin, acc, count, static_cast<W>(scale), stream);
    };
    const auto finish_as = [&](auto kAccumulate) {
        using One = std::integral_constant<int, 1>;
        using Two = std::integral_constant<int, 2>;
        if (early > 0) return finish(Two{}, std::true_type{}, kAccumulate);
        if (early == 0) return finish(Two{}, std::false_type{}, kAccumulate);
        finish(One{}, std::false_type{}, kAccumulate);
    };
    accumulate ? finish_as(std::true_type{}) : finish_as(std::false_type{});
}

// The statistics of a call, from those of its blocks; null where nobody asks for them.
class Stats {
 public:
    Stats(double* out, int64_t blocks)
        : out_(out), sums_(out != nullptr ? blocks : 0), bad_(sums_.size()) {}

    // Takes in block number `b`, whose `count` values are stored at `acc`. Threads may do so at a
    // time, each for its own blocks.
    template <typename Acc>
    void add(int64_t b, Block<Acc>& block, const Acc* acc, int64_t count) {
        if (out_ == nullptr) return;
        sums_[b] = square_sum(block.squares);
        bad_[b] = !std::isfinite(sums_[b]);
        // A float's square cannot overflow a double, but a double's can.
        if (std::is_same_v<Acc, double> && bad_[b] != 0)
            bad_[b] = !std::all_of(acc, acc + count,
                                   [](Acc x) { return std::isfinite(convert<Wide<Acc>>(x)); });
    }

    void write() const {
        if (out_ == nullptr) return;
        const bool bad = std::any_of(bad_.begin(), bad_.end(), [](uint8_t b) { return b != 0; });
        out_[0] = lane_sum(sums_);
        out_[1] = bad ? 1.0 : 0.0;
    }

 private:
    double* out_;
    std::vector<double> sums_;
    std::vector<uint8_t> bad_;
};

}  // namespace zshard::cpu
