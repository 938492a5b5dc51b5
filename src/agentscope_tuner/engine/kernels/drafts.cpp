#include "drafts.h"

#include <algorithm>

namespace {

constexpr int TOKEN_BITS = 21;
constexpr int32_t SURE = 2, STRONGEST = 8, DISAGREEMENT = 4;

uint64_t after(uint64_t key, int64_t token) {
    constexpr uint64_t ONE = (uint64_t{1} << TOKEN_BITS) - 1, ALL = (uint64_t{1} << CONTEXT * TOKEN_BITS) - 1;
    return (key << TOKEN_BITS & ALL) | (static_cast<uint64_t>(token) & ONE);
}

uint64_t key_of(const int64_t* tokens) {
    uint64_t key = 0;
    for (int i = 0; i < CONTEXT; i++) key = after(key, tokens[i]);
    return key;
}

// Fibonacci hashing: the upper bits of a product are well mixed.
int64_t place(uint64_t key, int64_t bits) { return key * 0x9E3779B97F4A7C15u >> (64 - bits); }

}  // namespace

extern "C" void learn(Entry* table, const int64_t* tokens, int64_t count, int64_t bits) {
    for (int64_t at = CONTEXT; at < count; at++) {
        const uint64_t key = key_of(tokens + at - CONTEXT);
        Entry& entry = table[place(key, bits)];
        const bool known = entry.key == key && entry.strength > 0;
        if (known && entry.token == tokens[at])
            entry.strength = std::min(entry.strength + 1, STRONGEST);
        else if (known && entry.strength > DISAGREEMENT)
            entry.strength -= DISAGREEMENT;
        else if (!known && entry.strength > 1)
            entry.strength--;  // of contexts that share a place, the one that comes up more often keeps it
        else
            entry = {key, static_cast<int32_t>(tokens[at]), 1};
    }
}

extern "C" void guess(const Entry* table, int64_t* tokens, const int64_t* starts, const int64_t* most, int64_t* counts,
                      int64_t count, int64_t bits) {
    for (int64_t i = 0; i < count; i++) {
        int64_t* next = tokens + starts[i] + CONTEXT;
        uint64_t key = key_of(tokens + starts[i]);
        for (counts[i] = 0; counts[i] < most[i]; counts[i]++) {
            const Entry& entry = table[place(key, bits)];
            if (entry.key != key || entry.strength < SURE) break;
            *next++ = entry.token;
            key = after(key, entry.token);
        }
    }
}
