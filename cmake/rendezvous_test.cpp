// Threads as ranks: what a round's readers see, who is late, and what a wait that fails leaves.
#include "rendezvous.h"

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#include "check.h"

namespace zshard {
namespace {

using test::check_equal;
using test::check_throws;
using test::where;

constexpr int kRanks = 4;
constexpr double kLong = 60.0, kShort = 0.02;

// What each rank lends the others: plain memory, so that a missing order is a race to the
// sanitizer.
struct Lent {
    alignas(64) Presence presence;
    int64_t values[16];
};

std::vector<Lent> shared(uint32_t start = 0) {
    std::vector<Lent> lent(kRanks);
    for (Lent& each : lent) {
        each.presence.arrived.store(start);
        each.presence.departed.store(start);
        std::fill_n(each.values, 16, -1);
    }
    return lent;
}

Rendezvous seen_by(std::vector<Lent>& lent, int rank) {
    return {reinterpret_cast<uintptr_t>(lent.data()), sizeof(Lent), kRanks, rank};
}

template <typename F>
void on_every_rank(const F& f) {
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) ranks.emplace_back([&f, rank] { f(rank); });
    for (std::thread& rank : ranks) rank.join();
}

void readers_see_the_round_and_writers_wait_for_them(uint32_t start) {
    std::vector<Lent> lent = shared(start);
    on_every_rank([&](int rank) {
        Rendezvous mine = seen_by(lent, rank);
        for (int64_t round = 0; round < 3000; ++round) {
            check_equal(mine.await_departures(kLong), -1, where("rank", rank, "round", round));
            for (int64_t& value : lent[rank].values) value = round * kRanks + rank;
            mine.arrive();
            check_equal(mine.await_arrivals(kLong), -1, where("rank", rank, "round", round));
            for (int from = 0; from < kRanks; ++from)
                for (const int64_t value : lent[from].values)
                    check_equal(value, round * kRanks + from, where("rank", rank));
            mine.depart();
        }
    });
}

void the_first_late_rank_is_named() {
    std::vector<Lent> lent = shared();
    Rendezvous first = seen_by(lent, 0);
    check_equal(first.await_arrivals(kShort), -1);  // nobody has arrived, and nobody is late
    first.arrive();
    seen_by(lent, 1).arrive();
    check_equal(first.await_arrivals(kShort), 2);
    seen_by(lent, 2).arrive();
    check_equal(first.await_arrivals(0.0), 3);
    seen_by(lent, 3).arrive();
    check_equal(first.await_arrivals(0.0), -1);
    check_equal(first.await_departures(kShort), 1);
    for (int rank = 1; rank < kRanks; ++rank) seen_by(lent, rank).depart();
    check_equal(first.await_departures(0.0),
                -1);  // of the others: this rank need not wait for itself
}

void one_who_is_ahead_is_not_late() {
    std::vector<Lent> lent = shared(UINT32_MAX - 1);
    Rendezvous first = seen_by(lent, 0);
    for (int rank = 1; rank < kRanks; ++rank)
        for (int times = 0; times < 3; ++times) seen_by(lent, rank).arrive();
    first.arrive();  // the largest count; the others' have wrapped around
    check_equal(first.await_arrivals(0.0), -1);
}

void a_place_that_cannot_be_is_refused() {
    alignas(64) static Presence two[2];
    const auto memory = reinterpret_cast<uintptr_t>(two);
    using Bad = std::invalid_argument;
    check_throws<Bad>([=] { Rendezvous(memory + 4, 64, 2, 0); }, "64 bytes");
    check_throws<Bad>([=] { Rendezvous(memory, 32, 2, 0); }, "64 bytes");
    check_throws<Bad>([=] { Rendezvous(memory, 64, 2, 2); }, "rank 2 is not in [0, 2)");
}

}  // namespace
}  // namespace zshard

int main() {
    zshard::readers_see_the_round_and_writers_wait_for_them(0);
    zshard::readers_see_the_round_and_writers_wait_for_them(UINT32_MAX -
                                                            700);  // wraps around midway
    zshard::the_first_late_rank_is_named();
    zshard::one_who_is_ahead_is_not_late();
    zshard::a_place_that_cannot_be_is_refused();
}
