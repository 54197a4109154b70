// csrc/formulas.h: AdamW and Adam over many steps of one element, beside the same recurrence in
// double as the papers write it.
#include <cmath>
#include <cstdint>

#include "check.h"
#include "formulas.h"

namespace zshard {
namespace {

using test::check;
using test::where;

template <bool kDecoupled>
void test_adamw() {
    const Adamw::Hyper hyper{.lr = 1e-2,
                             .beta1 = 0.9,
                             .beta2 = 0.99,
                             .eps = 1e-8,
                             .weight_decay = 0.1,
                             .decoupled = kDecoupled ? 1.0 : 0.0};
    float parameter = 0.75f;
    float states[2] = {0.0f, 0.0f};
    double p = parameter;
    double m = 0.0;
    double v = 0.0;
    for (int step = 1; step <= 200; ++step) {
        const float gradient = static_cast<float>(std::sin(0.7 * step) + 0.25);
        Adamw::update<kDecoupled>(gradient, parameter, states, Adamw::factors(hyper, step));

        double g = gradient;
        if (kDecoupled) {
            p *= 1.0 - hyper.lr * hyper.weight_decay;
        } else {
            g += hyper.weight_decay * p;
        }
        m = hyper.beta1 * m + (1.0 - hyper.beta1) * g;
        v = hyper.beta2 * v + (1.0 - hyper.beta2) * g * g;
        const double m_hat = m / (1.0 - std::pow(hyper.beta1, step));
        const double v_hat = v / (1.0 - std::pow(hyper.beta2, step));
        p -= hyper.lr * m_hat / (std::sqrt(v_hat) + hyper.eps);

        // About 16 fp32 roundings of values near 1, far below one step's 1e-2.
        const double tolerance = 2e-6;
        const auto at =
            where("decoupled", kDecoupled, "step", step, "p", parameter, "in double", p);
        check(std::abs(parameter - p) <= tolerance, "the parameter follows the paper", at);
        check(std::abs(states[0] - m) <= tolerance, "the first moment follows the paper", at);
        check(std::abs(states[1] - v) <= tolerance, "the second moment follows the paper", at);
    }
}

}  // namespace
}  // namespace zshard

int main() {
    zshard::test_adamw<true>();
    zshard::test_adamw<false>();
}
