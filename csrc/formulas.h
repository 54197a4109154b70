// Every formula, once, for host and device (not named math.h: that would shadow the system header).
// The launchers in cpu/ and cuda/ only loop over these.
//
// [Note: same bits] Compiled without contraction (-ffp-contract=off, -fmad=false) and with IEEE
// division and square root, each operation here is rounded by itself. So an element gets the same
// bits on every instruction set, on CPU and CUDA, and at every position in a buffer. Only which NaN
// an operation yields is left open.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define ZSHARD_HD __host__ __device__ __forceinline__
#else
#define ZSHARD_HD [[gnu::always_inline]] inline
#endif

namespace zshard {

// Storage types of the two 16-bit formats; arithmetic happens in float. Enumerations, because g++
// does not vectorise loops that copy structs.
enum class Bf16 : uint16_t {};
enum class Fp16 : uint16_t {};

template <typename To, typename From>
ZSHARD_HD To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

// ---- conversions: to float exactly, from float to nearest even, NaN to some NaN ----

ZSHARD_HD float to_float(float x) { return x; }

ZSHARD_HD float to_float(Bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x) << 16); }

ZSHARD_HD float to_float(Fp16 x) {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(static_cast<uint16_t>(x)));
#else
    // Shift the mantissa into place and move the exponent's bias from 15 to 127; a subnormal is
    // normalised by the float subtraction. Selects, not branches, so that loops over this
    // vectorise.
    const auto bits = static_cast<uint32_t>(x);
    const uint32_t sign = (bits & 0x8000u) << 16;
    const uint32_t magnitude = (bits & 0x7FFFu) << 13;
    const uint32_t normal = magnitude + (112u << 23);
    const uint32_t special = magnitude | 0x7F800000u;
    const float subnormal = bit_cast<float>(magnitude + (113u << 23)) - bit_cast<float>(113u << 23);
    const uint32_t small = bit_cast<uint32_t>(subnormal);
    const uint32_t finite = magnitude < 0x00800000u ? small : normal;
    return bit_cast<float>(sign | (magnitude >= 0x0F800000u ? special : finite));
#endif
}

template <typename T>
T from_float(float x) = delete;

template <>
ZSHARD_HD float from_float<float>(float x) {
    return x;
}

template <>
ZSHARD_HD Bf16 from_float<Bf16>(float x) {
#ifdef __CUDA_ARCH__
    return Bf16{__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
    const uint32_t quiet = bits | 0x400000u;
    // With a name of its own: g++ would narrow both, their condition too, and choose then, which is
    // a fifth more instructions (AVX2).
    const uint32_t chosen = x != x ? quiet : rounded;
    return Bf16{static_cast<uint16_t>(chosen >> 16)};
#endif
}

template <>
ZSHARD_HD Fp16 from_float<Fp16>(float x) {
#ifdef __CUDA_ARCH__
    return Fp16{__half_as_ushort(__float2half_rn(x))};
#else
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    // Normal result: rebias the exponent and round the 13 bits that go away to even.
    const uint32_t normal = (magnitude - (112u << 23) + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Subnormal result: adding 0.5 aligns the value so that the float addition itself rounds to
    // even.
    const float aligned = bit_cast<float>(magnitude) + 0.5f;
    const uint32_t subnormal = bit_cast<uint32_t>(aligned) - bit_cast<uint32_t>(0.5f);
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    const uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
    // 65520 and more round to infinity.
    return Fp16{static_cast<uint16_t>(sign | (magnitude >= 0x477FF000u ? special : finite))};
#endif
}

// One element from any storage type to any other, rounded once.
template <typename To, typename From>
ZSHARD_HD To convert(From x) {
    if constexpr (std::is_same_v<To, double> || std::is_same_v<From, double>) {
        return static_cast<To>(x);  // float64 goes to and from float32 only
    } else {
        return from_float<To>(to_float(x));
    }
}

// The type that sums and products of T are formed in.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename To, typename From>
ZSHARD_HD To convert_scaled(From x, Wide<From> scale) {
    return convert<To>(convert<Wide<From>>(x) * scale);
}

// ---- the fp32 master as two 16-bit planes ----

// A split master: hi = bits rounded half up to 16 bits (a bf16: the gather's send buffer), lo
// = the signed rest: every fp32 is hi * 2^16 + lo exactly. Of the NaN patterns, that map would send
// 0x7FFF8000..0x7FFFFFFF, among them CUDA's canonical NaN, to hi = +-0, and a NaN weight would be 0
// in the compute copy. Before splitting, the NaNs are permuted so that only 0x7F808000..0x7F80FFFF
// land there: signalling NaNs, which no arithmetic yields.
struct SplitMaster {
    Bf16 hi;
    int16_t lo;
};

ZSHARD_HD SplitMaster split_master(float x) {
    uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint32_t signalling = magnitude >= 0x7F808000u ? 0x7F0000u : 0u;
    bits += magnitude >= 0x7F810000u ? 0u - 0x8000u : signalling;
    const uint32_t hi = (bits + 0x8000u) >> 16;
    return {Bf16{static_cast<uint16_t>(hi)}, static_cast<int16_t>(bits & 0xFFFFu)};
}

ZSHARD_HD float join_master(SplitMaster planes) {
    uint32_t bits = (static_cast<uint32_t>(planes.hi) << 16) + static_cast<uint32_t>(planes.lo);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint32_t quiet = magnitude >= 0x7F808000u ? 0x8000u : 0u;
    bits += magnitude >= 0x7FFF8000u ? 0u - 0x7F0000u : quiet;
    return bit_cast<float>(bits);
}

// ---- optimizers ----

// [Note: optimizer rules] The launchers in cpu/optim.h and cuda/optim.cuh take a rule. Its Hyper is
// a row of `hypers` as the caller gives it; its Factors are the same for one step, computed in
// double and rounded once. kStates is the number of fp32 buffers that a shard has beside its
// master. update() takes one element's gradient and changes its parameter and states. branch() says
// which of two updates a segment takes, so that no element has to ask, and used() how many of the
// states, the first ones, that update reads and writes.

// base^exponent by squaring: pow() differs between libraries, products do not.
ZSHARD_HD double power(double base, int64_t exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) result *= base;
        base *= base;
    }
    return result;
}

// Adam: Kingma & Ba 2015 (arXiv:1412.6980), algorithm 1. Decoupled decay: Loshchilov & Hutter 2019
// (arXiv:1711.05101), algorithm 2, with the decay taken before the step as torch does.
struct Adamw {
    struct Hyper {
        double lr, beta1, beta2, eps, weight_decay, decoupled;
    };

    struct Factors {
        float beta2;
        float one_minus_beta1;
        float one_minus_beta2;
        float eps;
        float decay;      // decoupled: 1 - lr * weight_decay; L2: weight_decay
        float step_size;  // lr / (1 - beta1^t)
        float rescale;    // 1 / sqrt(1 - beta2^t)
        int decoupled;
    };

    static constexpr int kStates = 2;

    // Of step number `step` (the first is 1).
    ZSHARD_HD static Factors factors(const Hyper& h, int64_t step) {
        // Without a decay both are the same, but for g + 0 * p where p is infinite.
        const bool decoupled = h.decoupled != 0.0 || h.weight_decay == 0.0;
        const double decay = decoupled ? 1.0 - h.lr * h.weight_decay : h.weight_decay;
        return {.beta2 = static_cast<float>(h.beta2),
                .one_minus_beta1 = static_cast<float>(1.0 - h.beta1),
                .one_minus_beta2 = static_cast<float>(1.0 - h.beta2),
                .eps = static_cast<float>(h.eps),
                .decay = static_cast<float>(decay),
                .step_size = static_cast<float>(h.lr / (1.0 - power(h.beta1, step))),
                .rescale = static_cast<float>(1.0 / sqrt(1.0 - power(h.beta2, step))),
                .decoupled = decoupled};
    }

    ZSHARD_HD static bool branch(const Factors& c) { return c.decoupled != 0; }
    ZSHARD_HD static constexpr int used(bool /*decoupled*/) { return 2; }

    template <bool kDecoupled>
    ZSHARD_HD static void update(float g, float& p, float (&states)[2], const Factors& c) {
        auto& [m, v] = states;
        if constexpr (kDecoupled) {
            p *= c.decay;
        } else {
            g += p * c.decay;
        }
        m += (g - m) * c.one_minus_beta1;
        v = v * c.beta2 + (g * c.one_minus_beta2) * g;
        p -= (m * c.step_size) / (sqrtf(v) * c.rescale + c.eps);
    }
};

// All ones where `condition` holds, else 0.
ZSHARD_HD uint32_t mask_of(bool condition) { return condition ? ~0u : 0u; }

// a under a mask of ones, b under 0. Not a condition: g++ copies a loop for either side of each
// condition that stays the same in it, and three of them make the code three times as large.
ZSHARD_HD float select(uint32_t mask, float a, float b) {
    return bit_cast<float>((bit_cast<uint32_t>(a) & mask) | (bit_cast<uint32_t>(b) & ~mask));
}

// Momentum and Nesterov's: Sutskever et al. 2013 (ICML), section 2, with the learning rate outside
// the buffer and dampening, as torch.optim.SGD has them.
struct Sgd {
    struct Hyper {
        double lr, momentum, dampening, weight_decay, nesterov, maximize;
    };

    struct Factors {
        float lr;
        float momentum;
        float one_minus_dampening;
        float decay;
        float sign;                        // -1 to maximize
        uint32_t decays, first, nesterov;  // masks; first: the buffer holds nothing yet
        int has_momentum;
    };

    static constexpr int kStates = 1;

    // Of step number `step` (the first is 1).
    ZSHARD_HD static Factors factors(const Hyper& h, int64_t step) {
        return {.lr = static_cast<float>(h.lr),
                .momentum = static_cast<float>(h.momentum),
                .one_minus_dampening = static_cast<float>(1.0 - h.dampening),
                .decay = static_cast<float>(h.weight_decay),
                .sign = h.maximize != 0.0 ? -1.0f : 1.0f,
                .decays = mask_of(h.weight_decay != 0.0),
                .first = mask_of(step == 1),
                .nesterov = mask_of(h.nesterov != 0.0),
                .has_momentum = h.momentum != 0.0};
    }

    ZSHARD_HD static bool branch(const Factors& c) { return c.has_momentum != 0; }
    ZSHARD_HD static constexpr int used(bool has_momentum) { return has_momentum ? 1 : 0; }

    // A decay of 0 adds nothing, not even 0 * infinity; nor does torch.
    template <bool kMomentum>
    ZSHARD_HD static void update(float g, float& p, float (&states)[1], const Factors& c) {
        g *= c.sign;
        g = select(c.decays, g + p * c.decay, g);
        if constexpr (kMomentum) {
            float& buffer = states[0];
            buffer = select(c.first, g, buffer * c.momentum + g * c.one_minus_dampening);
            g = select(c.nesterov, g + buffer * c.momentum, buffer);
        }
        p -= g * c.lr;
    }
};

// ---- clipping ----

// What multiplies gradients of this norm so that they have at most max_norm: the operations of
// torch.nn.utils.clip_grads_with_norm_, rounded one by one. A NaN stays one.
template <typename T>
ZSHARD_HD T clip_factor(T norm, T max_norm) {
    const T factor = T{1} / (norm + static_cast<T>(1e-6)) * max_norm;
    return factor > T{1} ? T{1} : factor;
}

// ---- sums of squares ----

// [Note: sum of squares] Squares are added in fp64, where they are exact, in an order fixed by
// position alone. A block is kSquareBlock elements, seen as (rows, columns, group); missing ones
// count as 0. Rows are added first, in order, then the group, then the columns, the last two by
// halving (upper half onto lower half). The blocks' sums are dealt to kSquareLanes lanes, each lane
// adds its own in order, and the lanes are halved likewise. On CUDA a thread holds one column's
// groups, so that it loads whole vectors.
inline constexpr int kSquareRows = 4;
inline constexpr int kSquareColumns = 256;
inline constexpr int kSquareGroup = 4;
inline constexpr int kSquareBlock = kSquareRows * kSquareColumns * kSquareGroup;
inline constexpr int kSquareLanes = 1024;

constexpr int64_t square_blocks(int64_t numel) { return (numel + kSquareBlock - 1) / kSquareBlock; }

}  // namespace zshard
