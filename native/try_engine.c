/* Plays a script of posts, bytes, cuts and closes on the engine and compares what comes of it: `make native-fuzz`.
 * Built with a fuzzer it takes its scripts from that, otherwise it makes a number of random ones. */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { LINES = 4, ITEMS = 16, MARK = '.' };

extern const struct kernels *shardline_kernels(int level);

struct posted {
    unsigned char *memory;
    size_t size, begins; /* in the stream of its line, without marks */
    int64_t guard;
    int good_digest, done, changed;
};

struct side {
    uint64_t line;
    int peer, sends, dead, cut, spoiled;
    size_t posted_bytes, written, read;
    uint64_t reported;
    int posts;
    struct posted items[ITEMS];
};

static struct engine *engine;
static struct side sides[LINES];

#define MUST(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

static unsigned char byte_at(size_t position) { return (unsigned char)(position * 131 + (position >> 8) * 7 + 1); }

static void *run(void *unused) {
    (void)unused;
    MUST(engine_run(engine) == 0);
    return NULL;
}

static void start(void) {
    static pthread_t thread;
    engine = engine_new(shardline_kernels(0));
    MUST(engine && !pthread_create(&thread, NULL, run, NULL));
}

static uint64_t digest_of(const unsigned char *data, size_t size) {
    const struct kernels *kernels = shardline_kernels(0);
    void *state = aligned_alloc(64, 1024);
    kernels->digest_begin(state);
    kernels->digest_more(state, data, size);
    uint64_t found = kernels->digest_end(state);
    free(state);
    return found;
}

static void open_side(struct side *side, int sends) {
    if (side->line)
        return;
    int pair[2];
    MUST(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    memset(side, 0, sizeof *side);
    side->peer = pair[1];
    side->sends = sends;
    MUST(!fcntl(side->peer, F_SETFL, O_NONBLOCK));
    side->line = engine_open(engine, pair[0], NULL, sends ? MARK : 0, 10000);
    MUST(side->line);
}

/* An item is done. */
static void check(struct side *side, uint64_t number, int status) {
    MUST(number && number <= (uint64_t)side->posts);
    struct posted *item = &side->items[number - 1];
    MUST(!item->done);
    item->done = 1;
    side->reported++;
    MUST(status == (item->good_digest || side->sends ? ENGINE_DONE : ENGINE_DIGEST));
    for (size_t i = 0; i < item->size && !side->sends; i++)
        MUST(item->memory[i] == byte_at(item->begins + i));
    MUST(side->sends || item->begins + item->size <= side->written);
}

/* wrong: a digest of other bytes, or memory that has changed before it leaves. */
static void post(struct side *side, size_t size, int wrong) {
    if (!side->line || side->posts == ITEMS || size == 0)
        return;
    struct posted *item = &side->items[side->posts];
    *item = (struct posted){malloc(size), size, side->posted_bytes, wrong, !wrong, 0, wrong};
    MUST(item->memory);
    unsigned char *right = malloc(size);
    for (size_t i = 0; i < size; i++)
        right[i] = byte_at(item->begins + i);
    uint64_t digest = digest_of(right, size) + (wrong ? 1 : 0);
    if (side->sends)
        memcpy(item->memory, right, size);
    free(right);
    int answer = engine_post(engine, side->line, (uint64_t)side->posts + 1, item->memory, size, digest,
                             side->sends ? &item->guard : NULL, 0);
    side->spoiled |= side->sends && wrong;
    side->posts++;
    side->posted_bytes += size;
    if (answer == ENGINE_DONE_NOW || answer == ENGINE_DIGEST_NOW)
        check(side, (uint64_t)side->posts, answer == ENGINE_DONE_NOW ? ENGINE_DONE : ENGINE_DIGEST);
}

/* The peer sends what the engine is to receive, or reads and compares what it sends. */
static void talk(struct side *side, size_t size) {
    unsigned char data[4096];
    size = size < sizeof data ? size : sizeof data;
    if (!side->line || side->cut || size == 0)
        return;
    if (!side->sends) {
        for (size_t i = 0; i < size; i++)
            data[i] = byte_at(side->written + i);
        ssize_t sent = send(side->peer, data, size, MSG_NOSIGNAL);
        side->written += sent > 0 ? (size_t)sent : 0;
        return;
    }
    ssize_t count = recv(side->peer, data, size, 0);
    for (ssize_t i = 0; i < count; i++, side->read++) {
        size_t position = side->read;
        int which = 0;
        while (which < side->posts && position > side->items[which].size)
            position -= side->items[which++].size + 1;
        MUST(which < side->posts);
        if (position == side->items[which].size)
            MUST(data[i] == MARK && !side->items[which].changed);
        else
            MUST(data[i] == byte_at(side->items[which].begins + position));
    }
}

static void reap(void) {
    struct engine_done done[3];
    size_t count;
    while ((count = engine_reap(engine, done, 3)))
        for (size_t i = 0; i < count; i++) {
            struct side *side = NULL;
            for (int j = 0; j < LINES; j++)
                side = sides[j].line == done[i].line ? &sides[j] : side;
            if (!side)
                continue; /* Closed since. */
            MUST(!side->dead);
            if (done[i].item == 0) {
                MUST(done[i].status != ENGINE_DONE && done[i].status != ENGINE_DIGEST);
                MUST(side->cut || side->spoiled);
                side->dead = 1;
                continue;
            }
            check(side, done[i].item, done[i].status);
        }
}

static void close_side(struct side *side) {
    if (!side->line)
        return;
    engine_close(engine, side->line);
    side->line = 0;
    /* From here on a touch is a use after free. */
    for (int i = 0; i < side->posts; i++)
        free(side->items[i].memory);
    close(side->peer);
    reap();
}

static void settle(struct side *side) {
    if (!side->line || side->cut || side->spoiled || side->sends)
        return;
    while (side->written < side->posted_bytes) {
        size_t rest = side->posted_bytes - side->written;
        talk(side, rest);
        reap();
    }
    struct pollfd bell = {.fd = engine_bell(engine), .events = POLLIN};
    while (side->reported < (uint64_t)side->posts) {
        MUST(poll(&bell, 1, 20000) == 1);
        reap();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!engine)
        start();
    for (size_t at = 0; at + 3 <= size; at += 3) {
        struct side *side = &sides[data[at] % LINES];
        size_t amount = (size_t)data[at + 1] * (data[at + 2] % 64);
        switch (data[at] / LINES % 8) {
        case 0: open_side(side, data[at + 1] & 1); break;
        case 1: post(side, amount, 0); break;
        case 2: post(side, amount, data[at + 2] > 250); break;
        case 3: talk(side, amount); break;
        case 4: reap(); break;
        case 5:
            if (side->line && data[at + 1] > 192) {
                side->cut = 1;
                shutdown(side->peer, SHUT_RDWR);
            }
            break;
        case 6:
            if (side->line && side->sends && side->posts && data[at + 1] > 128) {
                struct posted *item = &side->items[data[at + 2] % side->posts];
                if (item->done)
                    break;
                /* It has left, or it is too early to say. */
                __atomic_store_n(&item->guard, 1, __ATOMIC_RELEASE);
                side->spoiled = 1;
            }
            break;
        default: close_side(side); break;
        }
    }
    for (int i = 0; i < LINES; i++) {
        settle(&sides[i]);
        close_side(&sides[i]);
    }
    return 0;
}

#ifndef FUZZER
int main(int count, char **arguments) {
    unsigned seed = count > 2 ? (unsigned)atoi(arguments[2]) : 1;
    long scripts = count > 1 ? atol(arguments[1]) : 10000;
    uint8_t script[300];
    for (long i = 0; i < scripts; i++) {
        size_t size = (size_t)rand_r(&seed) % sizeof script;
        for (size_t j = 0; j < size; j++)
            script[j] = (uint8_t)rand_r(&seed);
        LLVMFuzzerTestOneInput(script, size);
    }
    printf("%ld scripts\n", scripts);
    return 0;
}
#endif
