// WordPiece tokenization of ASCII texts, as the tokenizers library does it behind BERT's normalizer and pre-tokenizer.
//
// A word is cut greedily into the longest pieces of the vocabulary (Wu et al., 2016, https://arxiv.org/abs/1609.08144).
// The vocabulary is a hash table with open addressing, made by `wordpiece_fill`; a piece is found by the hash of its
// bytes, which is computed once for all prefixes of what is left of a word.

#include "library.h"

enum { DROPPED, SPACE, ISOLATED, LETTER };  // what becomes of a byte
enum { LONGEST_WORD = 256 };

struct piece {
    int32_t begin, length;  // of its bytes in the vocabulary, without the prefix
    int32_t id;
    int32_t within;         // 1 where it continues a word, 0 where it begins one
};

struct wordpiece {
    const uint8_t *bytes;        // all pieces, each followed by a zero
    const uint8_t *prefix;       // of pieces that continue a word
    const int32_t *ids;          // [count]
    struct piece *pieces;        // [count], made by `wordpiece_fill`
    int32_t *table;              // [mask + 1]: the index of a piece, or -1; made by `wordpiece_fill`
    const uint8_t *kinds;        // [128]: what becomes of a byte
    const uint8_t *mapped;       // [128]: the byte in its place, of letters and isolated ones
    const int32_t *leading, *trailing;  // special tokens around each text
    const uint8_t *added;        // tokens that are found before words are, each followed by a zero
    const uint8_t *begins_added; // [128]: whether one of them begins with a byte
    int64_t count, mask;         // mask + 1 is a power of two greater than count
    int64_t prefix_length;
    int64_t longest_piece;       // in bytes; set by `wordpiece_fill`
    int64_t longest_word;        // in bytes, at most LONGEST_WORD; a longer word is unknown
    int64_t bytes_size, added_size;  // of `bytes` and `added`, their zeros included
    int64_t leading_count, trailing_count, added_count;
    int32_t unknown;
};

static inline uint64_t begin_hash(int within) { return within ? 0x9e3779b97f4a7c15u : 0xcbf29ce484222325u; }

static inline uint64_t add_byte(uint64_t hash, uint8_t byte) { return (hash ^ byte) * 0x100000001b3u; }

// The high bits of the product depend on all bytes, the low ones on few.
static inline int64_t slot_of(uint64_t hash, int64_t mask) { return (int64_t)((hash ^ hash >> 29) & (uint64_t)mask); }

int64_t wordpiece_size(void) { return sizeof(struct wordpiece); }

// Whether `size` bytes are `count` strings, each followed by a zero.
static int are_strings(const uint8_t *bytes, int64_t size, int64_t count) {
    if (count < 0 || size < 0 || size > INT32_MAX) return 0;
    int64_t zeros = 0;
    for (int64_t i = 0; i < size; i++) zeros += bytes[i] == 0;
    return zeros == count && (size == 0 || bytes[size - 1] == 0);
}

static int is_valid(const struct wordpiece *vocabulary) {
    const int64_t slots = vocabulary->mask + 1, count = vocabulary->count;
    return count >= 0 && count < slots && slots <= INT32_MAX && (slots & vocabulary->mask) == 0 &&
           vocabulary->prefix_length >= 0 && vocabulary->longest_word >= 0 && vocabulary->longest_word <= LONGEST_WORD &&
           vocabulary->leading_count >= 0 && vocabulary->leading_count <= INT32_MAX && vocabulary->trailing_count >= 0 &&
           vocabulary->trailing_count <= INT32_MAX && are_strings(vocabulary->bytes, vocabulary->bytes_size, count) &&
           are_strings(vocabulary->added, vocabulary->added_size, vocabulary->added_count);
}

// Returns DONE, or BAD_CALL where the vocabulary is not what its sizes say. Whatever is encoded has been filled.
int wordpiece_fill(struct wordpiece *vocabulary) {
    if (!is_valid(vocabulary)) return BAD_CALL;
    const uint8_t *next = vocabulary->bytes;
    memset(vocabulary->table, 0xff, (size_t)(vocabulary->mask + 1) * sizeof(int32_t));
    vocabulary->longest_piece = 0;
    for (int32_t i = 0; i < vocabulary->count; i++) {
        const int64_t whole = (int64_t)strlen((const char *)next), skipped = vocabulary->prefix_length;
        const int within = whole > skipped && memcmp(next, vocabulary->prefix, (size_t)skipped) == 0;
        const uint8_t *begin = within ? next + skipped : next;
        const int64_t length = within ? whole - skipped : whole;
        uint64_t hash = begin_hash(within);
        for (int64_t j = 0; j < length; j++) hash = add_byte(hash, begin[j]);
        int64_t slot = slot_of(hash, vocabulary->mask);
        while (vocabulary->table[slot] >= 0) slot = (slot + 1) & vocabulary->mask;
        vocabulary->table[slot] = i;
        vocabulary->pieces[i] =
            (struct piece){(int32_t)(begin - vocabulary->bytes), (int32_t)length, vocabulary->ids[i], within};
        vocabulary->longest_piece = greater(vocabulary->longest_piece, length);
        next += whole + 1;
    }
    return DONE;
}

static int32_t find(const struct wordpiece *vocabulary, const uint8_t *bytes, int64_t length, uint64_t hash, int within) {
    for (int64_t slot = slot_of(hash, vocabulary->mask);; slot = (slot + 1) & vocabulary->mask) {
        const int32_t i = vocabulary->table[slot];
        if (i < 0) return -1;
        const struct piece *piece = vocabulary->pieces + i;
        if (piece->length == length && piece->within == within &&
            memcmp(vocabulary->bytes + piece->begin, bytes, (size_t)length) == 0)
            return piece->id;
    }
}

// Writes the ids of a word's pieces, at most `length`, and returns their number.
static int64_t encode_word(const struct wordpiece *vocabulary, const uint8_t *word, int64_t length, int32_t *ids) {
    uint64_t hashes[LONGEST_WORD + 1];
    int64_t count = 0;
    if (length > vocabulary->longest_word) {
        ids[0] = vocabulary->unknown;
        return 1;
    }
    for (int64_t begin = 0; begin < length;) {
        const int within = begin > 0;
        int64_t size = lesser(length - begin, vocabulary->longest_piece);
        int32_t id = -1;
        hashes[0] = begin_hash(within);
        for (int64_t i = 0; i < size; i++) hashes[i + 1] = add_byte(hashes[i], word[begin + i]);
        for (; size > 0; size--)
            if ((id = find(vocabulary, word + begin, size, hashes[size], within)) >= 0) break;
        if (size == 0) {
            ids[0] = vocabulary->unknown;
            return 1;
        }
        ids[count++] = id;
        begin += size;
    }
    return count;
}

static int begins_added_token(const struct wordpiece *vocabulary, const uint8_t *byte, const uint8_t *end) {
    const uint8_t *token = vocabulary->added;
    for (int64_t i = 0; i < vocabulary->added_count; i++) {
        const int64_t length = (int64_t)strlen((const char *)token);
        if (length <= end - byte && memcmp(token, byte, (size_t)length) == 0) return 1;
        token += length + 1;
    }
    return 0;
}

// Whether a text is ASCII and without added tokens.
static int is_covered(const struct wordpiece *vocabulary, const uint8_t *begin, const uint8_t *end) {
    for (const uint8_t *byte = begin; byte < end; byte++) {
        if (*byte >= 128) return 0;
        if (vocabulary->begins_added[*byte] && begins_added_token(vocabulary, byte, end)) return 0;
    }
    return 1;
}

// Encodes those of `texts` texts that are covered, not empty, and of `longest` bytes at most; of the others come no ids.
// Text i has the bytes offsets[i] to offsets[i + 1] - 1 of `bytes`. Its ids end at ends[i] in `ids`, which has room for a
// token per byte and the special ones. At most `limit` tokens of a text stay, special ones included: the first, or the
// last where `left`; `limit` 0 keeps all. Returns the number of ids, or -1 where the offsets
// are not within the `size` bytes, or `ids` has too few `places`.
int64_t wordpiece_encode(const struct wordpiece *vocabulary, const uint8_t *bytes, int64_t size,
                         const int64_t *offsets, int64_t texts, int64_t longest, int64_t limit, int32_t left,
                         int32_t *ids, int64_t places, int64_t *ends) {
    const int64_t special = vocabulary->leading_count + vocabulary->trailing_count;
    const int64_t room = limit ? greater(limit - special, 0) : INT64_MAX;
    uint8_t word[LONGEST_WORD + 1];
    int64_t total = 0, needed;
    if (texts < 0 || size < 0 || limit < 0 || offsets[0] < 0) return -1;
    for (int64_t text = 0; text < texts; text++)
        if (offsets[text + 1] < offsets[text]) return -1;
    if (offsets[texts] > size || __builtin_mul_overflow(texts, special, &needed)) return -1;
    if (__builtin_add_overflow(needed, offsets[texts] - offsets[0], &needed) || needed > places) return -1;
    for (int64_t text = 0; text < texts; text++) {
        const uint8_t *begin = bytes + offsets[text], *end = bytes + offsets[text + 1];
        int64_t length = 0, count = 0;
        ends[text] = total;
        if (begin == end || end - begin > longest || !is_covered(vocabulary, begin, end)) continue;
        for (int64_t i = 0; i < vocabulary->leading_count; i++) ids[total++] = vocabulary->leading[i];
        int32_t *own = ids + total;
        for (const uint8_t *byte = begin;; byte++) {
            const int kind = byte < end ? vocabulary->kinds[*byte] : SPACE;
            if (kind == LETTER) {
                if (length <= LONGEST_WORD) word[length++] = vocabulary->mapped[*byte];
                continue;
            }
            if (kind == DROPPED) continue;
            if (length) count += encode_word(vocabulary, word, length, own + count);
            length = 0;
            if (kind == ISOLATED) count += encode_word(vocabulary, &vocabulary->mapped[*byte], 1, own + count);
            if (byte >= end || (count >= room && !left)) break;
        }
        if (count > room) {
            if (left) memmove(own, own + count - room, (size_t)room * sizeof(int32_t));
            count = room;
        }
        total += count;
        for (int64_t i = 0; i < vocabulary->trailing_count; i++) ids[total++] = vocabulary->trailing[i];
        ends[text] = total;
    }
    return total;
}
