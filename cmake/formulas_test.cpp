// csrc/formulas.h: the conversions against arithmetic on doubles, the split master against the
// identity, and powers. By default every 997th of the 2^32 fp32 patterns and all those near the
// places where something turns; with an argument, its step instead: `formulas_test 1` takes every
// pattern.
#include "formulas.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <limits>

#include "check.h"

namespace zshard {
namespace {

using test::check;
using test::check_equal;
using test::where;

// x rounded to nearest even to `mantissa` bits behind the leading one and no finer than 2^lowest,
// by std::nearbyint on doubles, in which every step here is exact.
double round_to(double x, int mantissa, int lowest, double largest) {
    if (x == 0.0 || !std::isfinite(x)) return x;
    const int exponent = std::max(std::ilogb(x) - mantissa, lowest);
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -exponent)), exponent);
    return std::abs(rounded) > largest ? std::copysign(INFINITY, x) : rounded;
}

void check_conversions(uint32_t bits) {
    const float x = bit_cast<float>(bits);
    const auto at = where("bits", bits, "value", x);
    const float bf16 = to_float(from_float<Bf16>(x));
    const float fp16 = to_float(from_float<Fp16>(x));
    if (std::isnan(x)) {
        check(std::isnan(bf16) && std::isnan(fp16), "NaN stays NaN", at);
        return;
    }
    const double largest_bf16 = std::ldexp(255.0, 120);
    check_equal(bit_cast<uint32_t>(bf16),
                bit_cast<uint32_t>(static_cast<float>(round_to(x, 7, -133, largest_bf16))), at);
    check_equal(bit_cast<uint32_t>(fp16),
                bit_cast<uint32_t>(static_cast<float>(round_to(x, 10, -24, 65504.0))), at);
}

void check_split(uint32_t bits) {
    const auto at = where("bits", bits);
    const float x = bit_cast<float>(bits);
    const SplitMaster planes = split_master(x);
    check_equal(bit_cast<uint32_t>(join_master(planes)), bits, at);
    const float hi = to_float(planes.hi);
    if (std::isnan(x)) {
        const bool quiet = (bits & 0x00400000u) != 0;
        check(std::isnan(hi) || !quiet, "a quiet NaN is NaN in the upper plane", at);
    } else if (std::isinf(x) || x == 0.0f) {
        check_equal(bit_cast<uint32_t>(hi), bits, at);
    } else {
        check(
            std::abs(bit_cast<int32_t>(bits) - bit_cast<int32_t>(bit_cast<uint32_t>(hi))) <= 0x8000,
            "the upper plane is at most half a unit away", at);
    }
}

void check_patterns(uint64_t step) {
    for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += step) {
        check_conversions(static_cast<uint32_t>(bits));
        check_split(static_cast<uint32_t>(bits));
    }
    for (uint64_t upper = 0; upper < (uint64_t{1} << 32); upper += 0x1000) {
        for (const uint32_t offset : {0u, 1u, 0x7FFu, 0x800u, 0x801u, 0xFFFu}) {
            check_conversions(static_cast<uint32_t>(upper) + offset);
            check_split(static_cast<uint32_t>(upper) + offset);
        }
    }
}

void check_16_bit_values_survive() {
    for (uint32_t bits = 0; bits < (1u << 16); ++bits) {
        const auto half = static_cast<uint16_t>(bits);
        const float bf16 = to_float(Bf16{half}), fp16 = to_float(Fp16{half});
        if (!std::isnan(bf16))
            check_equal(static_cast<uint16_t>(from_float<Bf16>(bf16)), half, where("bf16", half));
        if (!std::isnan(fp16))
            check_equal(static_cast<uint16_t>(from_float<Fp16>(fp16)), half, where("fp16", half));
        const bool is_nan = (bits & 0x7FFFu) > 0x7C00u;
        check_equal(std::isnan(fp16), is_nan, where("fp16", half));
    }
}

void check_power() {
    for (const double base : {0.0, 0.5, 0.9, 0.999, 0.99999}) {
        check_equal(power(base, 0), 1.0);
        for (const int64_t exponent : {1, 2, 3, 10, 1000, 1 << 20}) {
            const double expected = std::pow(base, static_cast<double>(exponent));
            check(std::abs(power(base, exponent) - expected) <=
                      expected * 1e-16 * static_cast<double>(exponent + 1),
                  "power agrees with pow", where("base", base, "exponent", exponent));
        }
    }
}

}  // namespace
}  // namespace zshard

int main(int argc, char** argv) {
    const uint64_t step = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 997;
    zshard::test::check(step > 0, "the step is a positive number");
    zshard::check_patterns(step);
    zshard::check_16_bit_values_survive();
    zshard::check_power();
}
