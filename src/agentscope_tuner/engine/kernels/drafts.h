// A table of what followed the last few tokens before, and guesses from it: see `drafts.py`.

#pragma once

#include <cstdint>

constexpr int CONTEXT = 3;  // tokens that a guess looks back on

// What follows a context, of which the tokens are the key, and how sure that is.
struct Entry {
    uint64_t key;
    int32_t token, strength;
};

// Remembers `count` tokens, the first of which are the context of the next one, in a table of 2^bits entries.
extern "C" void learn(Entry* table, const int64_t* tokens, int64_t count, int64_t bits);

// Of `count` sequences: writes behind the context that begins at tokens[starts[i]] what probably follows it, at most
// `most[i]` tokens, and how many these are to counts[i].
extern "C" void guess(const Entry* table, int64_t* tokens, const int64_t* starts, const int64_t* most, int64_t* counts,
                      int64_t count, int64_t bits);
