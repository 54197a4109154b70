// Loads and stores of several elements at once, and a run of elements converted by a block.
#pragma once

#include "cuda/launch.h"
#include "index.h"

namespace zshard::cuda {

// kCount elements that move in accesses of 16 bytes, or of all they have where that is less.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Vector {
    T values[kCount];
};

// What an aligned vector is stored in, by an intrinsic: an assignment is split into its elements'
// wherever nvcc does not find them together again.
template <int kBytes>
using Word = std::conditional_t<
    kBytes >= 16, uint4,
    std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;

template <int kCount, typename T>
ZSHARD_HD bool is_aligned(const T* p) {
    return reinterpret_cast<uint64_t>(p) % alignof(Vector<T, kCount>) == 0;
}

template <int kCount, typename T>
__device__ __forceinline__ Vector<T, kCount> load(const T* p, bool aligned) {
    if (aligned) return *reinterpret_cast<const Vector<T, kCount>*>(p);
    Vector<T, kCount> v;
#pragma unroll
    for (int k = 0; k < kCount; ++k) v.values[k] = p[k];
    return v;
}

template <int kCount, typename T>
__device__ __forceinline__ void store(T* p, const Vector<T, kCount>& v, bool aligned) {
    if (kCount > 1 && aligned) {  // of single elements the intrinsic takes a third more registers
        using W = Word<sizeof(v)>;
        W words[sizeof(v) / sizeof(W)];
        memcpy(words, &v, sizeof(v));
#pragma unroll
        for (size_t i = 0; i < sizeof(v) / sizeof(W); ++i)
            __stwb(reinterpret_cast<W*>(p) + i, words[i]);
        return;
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) p[k] = v.values[k];
}

// What a thread of transform_run has in flight at once: vectors, and the elements of each.
inline constexpr int kRunUnroll = 4;
template <typename To, typename From>
inline constexpr int kRunWidth = 16 / (sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));

// Elements of an aligned run for which each thread of a block waits once.
template <typename To, typename From>
inline constexpr int64_t kRunTile = int64_t{kRunUnroll} * kRunWidth<To, From> * kThreads;

// out[0..numel) = convert(src[0..numel)) by the threads of a block. The stores decide the
// alignment; where the loads do not share it, they are single but still coalesced.
template <typename To, typename From, typename Convert>
__device__ void transform_run(To* out, const From* src, int64_t numel, Convert convert_one) {
    constexpr int kUnroll = kRunUnroll, kWidth = kRunWidth<To, From>;
    const Split split = split_run(reinterpret_cast<uint64_t>(out), sizeof(To), kWidth, numel);
    // Two loops, not one with a branch: that becomes predicates, and some loads are then waited for
    // before the others are asked for.
    const auto run = [&](auto aligned) {
        deal<kUnroll>(
            split, kWidth, threadIdx.x, kThreads, [&](int64_t i) { out[i] = convert_one(src[i]); },
            [&](const int64_t (&at)[kUnroll], auto count) {
                Vector<From, kWidth> loaded[count];
#pragma unroll
                for (int u = 0; u < count; ++u) loaded[u] = load<kWidth>(src + at[u], aligned);
#pragma unroll
                for (int u = 0; u < count; ++u) {
                    Vector<To, kWidth> stored;
#pragma unroll
                    for (int k = 0; k < kWidth; ++k)
                        stored.values[k] = convert_one(loaded[u].values[k]);
                    store(out + at[u], stored, true);
                }
            });
    };
    is_aligned<kWidth>(src + split.head) ? run(std::true_type{}) : run(std::false_type{});
}

// out = src * scale; scale 1 between equal types copies the bits.
template <typename To, typename From>
__device__ void convert_run(To* out, const From* src, int64_t numel, Wide<From> scale) {
    if constexpr (std::is_same_v<To, From>) {
        if (scale == 1) return transform_run(out, src, numel, [](From x) { return x; });
    }
    transform_run(out, src, numel, [=](From x) { return convert_scaled<To>(x, scale); });
}

}  // namespace zshard::cuda
