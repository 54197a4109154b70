// Which thread touches which element: host+device functions, so that cmake/index_test.cpp can show
// on the host that every element is visited exactly once at every size and alignment.
#pragma once

#include <cstdint>
#include <type_traits>

#include "formulas.h"

namespace zshard {

// A run of elements as vectors of `width` in aligned places, with the odd elements before and
// behind.
struct Split {
    int64_t head;     // elements before the first aligned one
    int64_t vectors;  // whole vectors from there on
    int64_t tail;     // elements behind the last vector
};

// Splits `numel` elements of `size` bytes from `address` on. Vectors begin at multiples of their
// own size in bytes. size divides address, and size and width are powers of two.
ZSHARD_HD Split split_run(uint64_t address, int64_t size, int64_t width, int64_t numel) {
    const int64_t misaligned = static_cast<int64_t>(address / size) & (width - 1);
    int64_t head = misaligned == 0 ? 0 : width - misaligned;
    head = head < numel ? head : numel;
    const int64_t vectors = (numel - head) / width;
    return {head, vectors, numel - head - vectors * width};
}

// Deals a split run to `threads` threads. Thread `thread` gets single elements by one(i) and
// vectors by many(at, count), kUnroll at a time so that their loads overlap: at[0..count) are the
// vectors' first elements, and count is an integral constant.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <int kUnroll, typename One, typename Many>
ZSHARD_HD void deal(const Split& split, int64_t width, int64_t thread, int64_t threads, One one,
                    Many many) {
    // Unrolled, the loops over the few odd elements and vectors would cost registers.
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (int64_t i = thread; i < split.head; i += threads) one(i);
    int64_t vector = thread;
    int64_t at[kUnroll];
    for (; vector + (kUnroll - 1) * threads < split.vectors; vector += kUnroll * threads) {
        for (int u = 0; u < kUnroll; ++u) at[u] = split.head + (vector + u * threads) * width;
        many(at, std::integral_constant<int, kUnroll>{});
    }
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (; vector < split.vectors; vector += threads) {
        at[0] = split.head + vector * width;
        many(at, std::integral_constant<int, 1>{});
    }
    const int64_t tail = split.head + split.vectors * width;
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (int64_t i = thread; i < split.tail; i += threads) one(tail + i);
}

// The last i in [0, count) with start(i) <= at; start ascends from start(0) <= at.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <typename Index, typename Start>
ZSHARD_HD Index last_not_after(Index count, int64_t at, Start start) {
    Index low = 0, high = count;
    while (high - low > 1) {
        const Index middle = low + (high - low) / 2;
        if (start(middle) <= at) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

}  // namespace zshard
