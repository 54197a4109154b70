// The assertions of the host tests: the first failure prints where, both values, and the
// coordinates given as context, and ends the program.
#pragma once

#include <cstdlib>
#include <iostream>
#include <source_location>
#include <string>
#include <utility>

namespace zshard::test {

// The coordinates at which a check runs, as text that is only made when it fails: where("n", n,
// "i", i).
template <typename... Parts>
auto where(const Parts&... parts) {
    return [parts...](std::ostream& out) { ((out << parts << ' '), ...); };
}

inline auto nowhere() {
    return [](std::ostream&) {};
}

template <typename Context = decltype(nowhere())>
void check(bool holds, const char* claim, Context&& context = nowhere(),
           std::source_location location = std::source_location::current()) {
    if (holds) {
        return;
    }
    std::cerr << location.file_name() << ':' << location.line() << ": does not hold: " << claim
              << "\n  at: ";
    context(std::cerr);
    std::cerr << std::endl;
    std::exit(1);
}

template <typename Actual, typename Expected, typename Context = decltype(nowhere())>
void check_equal(const Actual& actual, const Expected& expected, Context&& context = nowhere(),
                 std::source_location location = std::source_location::current()) {
    if (actual == expected) {
        return;
    }
    std::cerr << location.file_name() << ':' << location.line() << ": " << actual << " instead of "
              << expected << "\n  at: ";
    context(std::cerr);
    std::cerr << std::endl;
    std::exit(1);
}

// Runs `body`, which must throw Exception with `fragment` in its message.
template <typename Exception, typename Body>
void check_throws(Body&& body, const std::string& fragment,
                  std::source_location location = std::source_location::current()) {
    std::string message = "nothing was thrown";
    try {
        std::forward<Body>(body)();
    } catch (const Exception& error) {
        message = error.what();
    }
    check(message.find(fragment) != std::string::npos, "the message holds the fragment",
          where(message, "| fragment:", fragment), location);
}

}  // namespace zshard::test
