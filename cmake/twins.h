// Arrays drawn with a fixed seed, each there twice: for csrc/cpu and for csrc/cuda on the host.
// Each is an allocation of its own, so that ASan sees an access beyond it, and is compared whole.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"
#include "ops.h"

namespace zshard::test {

inline std::mt19937_64 generator;

inline int64_t draw(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(generator);
}

inline bool one_in(int64_t n) { return draw(1, n) == 1; }

// Around the places where tiles, blocks and vectors end, and others.
inline int64_t draw_numel() {
    const int64_t sizes[] = {0, 1, 3, 8, 255, 1024, 4095, 4096, 4097, 8191, 8193, draw(0, 20'000)};
    return sizes[draw(0, std::size(sizes) - 1)];
}

// All but fp64, in turn.
inline Dtype dtype_of(int64_t round) {
    constexpr Dtype kAll[] = {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16};
    return kAll[round % 3];
}

inline Dtype draw_dtype() { return dtype_of(draw(0, 2)); }

// All pairs that cast_ is between, in turn; the first ten are those that reduce_ takes.
inline constexpr int64_t kReducePairs = 10, kCastPairs = 12;
inline std::pair<Dtype, Dtype> dtypes_of(int64_t pair) {
    if (pair < 9) return {dtype_of(pair), dtype_of(pair / 3)};
    return {pair == 11 ? Dtype::kFloat32 : Dtype::kFloat64,
            pair == 10 ? Dtype::kFloat32 : Dtype::kFloat64};
}

// The same array twice: for the CPU and for the kernels.
template <typename T>
using Twin = std::array<T*, 2>;

class Memory {
 public:
    // Random bits, at times not at a multiple of 16 bytes.
    template <typename T>
    Twin<T> bits(int64_t numel) {
        const Twin<char> twin = add(numel * int64_t{sizeof(T)}, sizeof(T));
        return {reinterpret_cast<T*>(twin[0]), reinterpret_cast<T*>(twin[1])};
    }

    Twin<void> bits(int64_t numel, Dtype dtype) {
        const Twin<char> twin = add(numel * size_of(dtype), size_of(dtype));
        return {twin[0], twin[1]};
    }

    // Numbers in [low, 1): no NaN, whose bits are left open.
    Twin<void> numbers(int64_t numel, Dtype dtype, float low = -1.0f) {
        const Twin<char> twin = add(numel * size_of(dtype), size_of(dtype));
        std::uniform_real_distribution<float> value(low, 1.0f);
        const auto fill = [&](auto* data) {
            for (int64_t i = 0; i < numel; ++i)
                data[i] = convert<std::remove_pointer_t<decltype(data)>>(value(generator));
        };
        if (dtype == Dtype::kFloat64) {
            fill(reinterpret_cast<double*>(twin[0]));
        } else {
            dispatch(dtype, [&](auto type) { fill(reinterpret_cast<decltype(type)*>(twin[0])); });
        }
        std::memcpy(twin[1], twin[0], numel * size_of(dtype));
        return {twin[0], twin[1]};
    }

    // Bits, or numbers.
    Twin<void> values(int64_t numel, Dtype dtype, bool any) {
        return any ? bits(numel, dtype) : numbers(numel, dtype);
    }

    // Both sides of an op, on the arguments that make(side) gives.
    template <typename Args, typename Make, typename Context>
    void check_same(void (*on_cpu)(const Args&), void (*on_device)(const Args&), const Make& make,
                    const Context& context) const {
        on_cpu(make(0));
        on_device(make(1));
        compare(context);
    }

    // Requires what lies on both sides to be the same.
    template <typename Context>
    void compare(const Context& context) const {
        for (const Array& array : arrays_)
            for (int64_t i = 0; i < array.bytes; ++i)
                check_equal(int{array.data[1][i]}, int{array.data[0][i]}, [&](auto& out) {
                    context(out);
                    out << "array " << &array - arrays_.data() << " byte " << i - array.shift;
                });
    }

 private:
    struct Array {
        int64_t bytes, shift;
        std::unique_ptr<char[]> data[2];
    };

    Twin<char> add(int64_t bytes, int64_t alignment) {
        const int64_t shift = aligned_ || one_in(2) ? 0 : draw(0, 15) * alignment;
        Array array{.bytes = bytes + shift, .shift = shift, .data = {}};
        for (auto& data : array.data) data = std::make_unique<char[]>(array.bytes);
        for (int64_t i = 0; i < array.bytes; ++i)
            array.data[0][i] = array.data[1][i] = static_cast<char>(generator());
        arrays_.push_back(std::move(array));
        const auto& data = arrays_.back().data;
        return {data[0].get() + shift, data[1].get() + shift};
    }

    const bool aligned_ = one_in(2);  // all arrays: each by itself, they rarely were together
    std::vector<Array> arrays_;
};

// For both sides: rows of one array, or arrays of their own.
inline std::array<Rows, 2> draw_rows(Memory& memory, Dtype dtype, int64_t count, int64_t numel) {
    const bool apart = one_in(2);
    // Rows of a flat buffer are aligned alike; others take another path.
    const int64_t stride = one_in(2) ? (numel + 3) / 4 * 4 : numel + draw(0, 9);
    std::array<Rows, 2> rows{};
    const Twin<void> base = memory.numbers(apart ? 0 : (count - 1) * stride + numel, dtype);
    for (const int side : {0, 1})
        rows[side] = {dtype, count, apart ? nullptr : base[side], stride, {}};
    for (int64_t rank = 0; apart && rank < count; ++rank) {
        const Twin<void> peer = memory.numbers(numel, dtype);
        for (const int side : {0, 1}) rows[side].peers[rank] = peer[side];
    }
    return rows;
}

// Writes one element of a row.
inline void put(const Rows& rows, int64_t rank, int64_t at, double value) {
    if (rows.dtype == Dtype::kFloat64) {
        const_cast<double*>(rows.row<double>(rank))[at] = value;
        return;
    }
    dispatch(rows.dtype, [&](auto type) {
        using T = decltype(type);
        const_cast<T*>(rows.row<T>(rank))[at] = convert<T>(static_cast<float>(value));
    });
}

}  // namespace zshard::test
