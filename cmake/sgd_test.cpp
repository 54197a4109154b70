// csrc/formulas.h: SGD in each of its forms over many steps of one element, beside the same
// recurrence in double.
#include <cmath>

#include "check.h"
#include "formulas.h"

namespace zshard {
namespace {

using test::check;
using test::check_equal;
using test::where;

template <bool kMomentum>
void test_sgd(double dampening, double decay, bool nesterov, bool maximize) {
    const Sgd::Hyper hyper{.lr = 1e-2,
                           .momentum = kMomentum ? 0.9 : 0.0,
                           .dampening = dampening,
                           .weight_decay = decay,
                           .nesterov = nesterov ? 1.0 : 0.0,
                           .maximize = maximize ? 1.0 : 0.0};
    float parameter = 0.75f;
    float states[1] = {NAN};  // the first step must not read it
    double p = parameter;
    double buffer = 0.0;
    for (int step = 1; step <= 200; ++step) {
        const float gradient = static_cast<float>(std::sin(0.7 * step) + 0.25);
        const Sgd::Factors factors = Sgd::factors(hyper, step);
        check_equal(Sgd::branch(factors), kMomentum);
        Sgd::update<kMomentum>(gradient, parameter, states, factors);

        double g = (maximize ? -1.0 : 1.0) * gradient + decay * p;
        if (kMomentum) {
            buffer = step == 1 ? g : hyper.momentum * buffer + (1.0 - dampening) * g;
            g = nesterov ? g + hyper.momentum * buffer : buffer;
        }
        p -= hyper.lr * g;

        // Roundings of values below 8, far below one step's 1e-2.
        const double tolerance = 2e-5;
        const auto at = where("momentum", kMomentum, "dampening", dampening, "decay", decay,
                              "nesterov", nesterov, "maximize", maximize, "step", step);
        check(std::abs(parameter - p) <= tolerance, "the parameter follows the recurrence", at);
        check(!kMomentum || std::abs(states[0] - buffer) <= tolerance,
              "the buffer follows the recurrence", at);
        check(kMomentum || std::isnan(states[0]), "without momentum the buffer is left alone", at);
    }
}

}  // namespace
}  // namespace zshard

int main() {
    for (const double dampening : {0.0, 0.25})
        for (const double decay : {0.0, 0.1})
            for (const bool nesterov : {false, true})
                for (const bool maximize : {false, true}) {
                    zshard::test_sgd<false>(dampening, decay, nesterov, maximize);
                    zshard::test_sgd<true>(dampening, decay, nesterov, maximize);
                }
}
