/* See engine.h. */
#define _GNU_SOURCE
#include "engine.h"
#include "tls.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define XXH_STATIC_LINKING_ONLY
#include "xxhash.h"

enum {
    TURN_BYTES = 2 << 20,   /* that one line may move before the others have their turn */
    PIECE_BYTES = 512 << 10, /* received at once, so that they are in the cache when their digest is made */
    EVENTS = 64,
    TICK_MS = 250, /* between two looks for lines that have stalled */
    SLOTS = 256,   /* of the table of lines */
    LITTLE_BYTES = 64 << 10, /* an item that takes less time than waking a thread for it */
};

struct item {
    struct item *next;
    uint64_t number;
    unsigned char *at;
    size_t left;
    uint64_t digest;
    const int64_t *guard;
    int64_t value;
};

struct line {
    XXH3_state_t hash; /* of the first item's bytes so far */
    struct line *next; /* in the same slot of the table */
    uint64_t number;
    int socket;
    void *tls;      /* NULL: bytes go as they are */
    size_t pending; /* bytes that are encrypted and have not left */
    unsigned char mark;
    unsigned char mark_due; /* the mark of a payload that has left */
    unsigned char dead;
    unsigned char watched;
    unsigned char again; /* look at it without waiting for its socket: bytes that have arrived may lie in OpenSSL */
    int gathered; /* SO_RCVLOWAT as it is set */
    int64_t limit_ms;
    int64_t moved_ms;
    struct item *first, **last;
};

struct engine {
    const struct kernels *kernels;
    int epoll, bell, alarm;
    atomic_int stopping;
    int drowsy;                /* engine_run() waits without looking at the clock */
    pthread_mutex_t lock;      /* of everything below; a line that is `moving` belongs to engine_run() but its queue */
    pthread_cond_t moved;
    struct line *moving;
    uint64_t numbers;
    struct line *lines[SLOTS];
    int pending;               /* lines with something posted */
    int again;                 /* a line is to be looked at */
    struct engine_done *done;  /* a ring */
    size_t done_first, done_count, done_room;
    size_t owed;               /* reports that may still be made: one for each item, one for the end of each line */
    int rung;                  /* the bell has rung for those that are there */
    int ring_due;
};

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void ring(int bell) {
    uint64_t one = 1;
    while (write(bell, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static void silence(int bell) {
    uint64_t count;
    while (read(bell, &count, sizeof count) < 0 && errno == EINTR)
        ;
}

struct engine *engine_new(const struct kernels *kernels) {
    struct engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return NULL;
    engine->kernels = kernels;
    engine->epoll = epoll_create1(EPOLL_CLOEXEC);
    engine->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    engine->alarm = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->moved, NULL);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 0};
    if (engine->epoll < 0 || engine->bell < 0 || engine->alarm < 0 ||
        epoll_ctl(engine->epoll, EPOLL_CTL_ADD, engine->alarm, &event)) {
        engine_free(engine);
        return NULL;
    }
    return engine;
}

int engine_bell(const struct engine *engine) { return engine->bell; }

void engine_stop(struct engine *engine) {
    atomic_store(&engine->stopping, 1);
    ring(engine->alarm);
}

static void lock(struct engine *engine) { pthread_mutex_lock(&engine->lock); }

/* Whoever is woken needs the lock, so the bell rings without it. */
static void unlock(struct engine *engine) {
    int due = engine->ring_due;
    engine->ring_due = 0;
    pthread_mutex_unlock(&engine->lock);
    if (due)
        ring(engine->bell);
}

/* With the lock held. */

static struct line **place_of(struct engine *engine, uint64_t number) {
    struct line **place = &engine->lines[number % SLOTS];
    while (*place && (*place)->number != number)
        place = &(*place)->next;
    return place;
}

static int busy(const struct line *line) { return line->first != NULL || line->mark_due; }

/* Room for a report is made when it becomes possible, so that none is lost for want of memory. */
static int owe(struct engine *engine) {
    size_t needed = engine->done_count + engine->owed + 1;
    if (needed > engine->done_room) {
        struct engine_done *done = malloc(2 * needed * sizeof *done);
        if (!done)
            return 0;
        for (size_t i = 0; i < engine->done_count; i++)
            done[i] = engine->done[(engine->done_first + i) % engine->done_room];
        free(engine->done);
        engine->done = done;
        engine->done_first = 0;
        engine->done_room = 2 * needed;
    }
    engine->owed++;
    return 1;
}

static void report(struct engine *engine, const struct line *line, uint64_t item, int status) {
    size_t at = (engine->done_first + engine->done_count++) % engine->done_room;
    engine->owed--;
    engine->done[at] = (struct engine_done){line->number, item, status, 0};
    engine->ring_due |= !engine->rung;
    engine->rung = 1;
}

/* 0, or an errno. */
static int watch(struct engine *engine, struct line *line, int wanted) {
    if (line->watched == wanted || line->dead)
        return 0;
    struct epoll_event event = {.events = line->mark ? EPOLLOUT : EPOLLIN, .data.u64 = line->number};
    if (epoll_ctl(engine->epoll, wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, line->socket, &event))
        return errno;
    line->watched = (unsigned char)wanted;
    return 0;
}

static void drop_items(struct engine *engine, struct line *line) {
    while (line->first) {
        struct item *item = line->first;
        line->first = item->next;
        free(item);
        engine->owed--;
    }
    line->last = &line->first;
}

/* No more is moved on this line. */
static void end_line(struct engine *engine, struct line *line) {
    watch(engine, line, 0);
    engine->pending -= busy(line);
    line->dead = 1;
    shutdown(line->socket, SHUT_RDWR);
}

static void kill_line(struct engine *engine, struct line *line, int status) {
    if (line->dead)
        return;
    end_line(engine, line);
    drop_items(engine, line);
    report(engine, line, 0, status);
}

static int unchanged(const struct item *item) {
    if (!item->guard)
        return 1;
    /* Not before the bytes were read. */
    atomic_thread_fence(memory_order_acquire);
    return __atomic_load_n(item->guard, __ATOMIC_ACQUIRE) == item->value;
}

/* Without the lock, by engine_run() alone: the line is `moving`, and only its first item is touched. */

/* As recv(), sendmsg(): never waits. */

static ssize_t bytes_in(struct line *line, void *to, size_t size) {
    if (!line->tls)
        return recv(line->socket, to, size, MSG_DONTWAIT);
    ptrdiff_t count = shardline_tls_receive(line->tls, line->socket, to, size, 0);
    if (count >= 0)
        return count;
    errno = (int)-count;
    return -1;
}

static ssize_t bytes_out(struct line *line, struct iovec *parts, size_t count, int flags) {
    if (!line->tls) {
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
        return sendmsg(line->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL | flags);
    }
    ssize_t sent = 0;
    for (size_t i = 0; i < count; i++) {
        ptrdiff_t left =
            shardline_tls_send(line->tls, line->socket, parts[i].iov_base, parts[i].iov_len, &line->pending, 0);
        if (left <= 0 && sent == 0) {
            errno = left ? (int)-left : EAGAIN;
            return -1;
        }
        sent += left > 0 ? left : 0;
        if (left < (ptrdiff_t)parts[i].iov_len)
            break;
    }
    return sent;
}

/* Have the kernel wake us for many bytes at once, but never for more than are sure to come. */
static void gather(struct line *line, const struct item *item) {
    if (line->tls)
        return; /* How many records they come in is not known. */
    size_t most = PIECE_BYTES;
    int wanted = item && !line->mark ? (int)(item->left < most ? item->left : most) : 1;
    if (wanted != line->gathered && !setsockopt(line->socket, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted))
        line->gathered = wanted;
}

static struct item *first_of(struct engine *engine, struct line *line) {
    lock(engine);
    struct item *item = line->dead ? NULL : line->first;
    unlock(engine);
    return item;
}

static void end_item(struct engine *engine, struct line *line, int status) {
    lock(engine);
    if (!line->dead) {
        struct item *item = line->first;
        line->first = item->next;
        if (!line->first)
            line->last = &line->first;
        line->mark_due = line->mark != 0;
        engine->pending -= !busy(line);
        report(engine, line, item->number, status);
        free(item);
    }
    unlock(engine);
}

static void fail(struct engine *engine, struct line *line, int status) {
    lock(engine);
    kill_line(engine, line, status);
    unlock(engine);
}

/* Nothing is left to do: the socket is watched again with the next post. */
static void rest(struct engine *engine, struct line *line) {
    lock(engine);
    if (!busy(line))
        watch(engine, line, 0);
    unlock(engine);
}

static void look_again(struct engine *engine, struct line *line) {
    lock(engine);
    line->again = 1;
    engine->again = 1;
    unlock(engine);
}

static void receive(struct engine *engine, struct line *line) {
    size_t budget = TURN_BYTES;
    struct item *item;
    while ((item = first_of(engine, line)) && budget > 0) {
        size_t wanted = item->left < PIECE_BYTES ? item->left : PIECE_BYTES;
        ssize_t count = bytes_in(line, item->at, wanted);
        if (count < 0) {
            if (errno == EINTR)
                continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK)
                break;
            fail(engine, line, errno);
            return;
        }
        if (count == 0) {
            fail(engine, line, ENGINE_CLOSED);
            return;
        }
        if (item->digest)
            engine->kernels->digest_more(&line->hash, item->at, (size_t)count);
        item->at += count;
        item->left -= (size_t)count;
        line->moved_ms = now_ms();
        budget -= (size_t)count < budget ? (size_t)count : budget;
        if (item->left == 0) {
            int wrong = item->digest && engine->kernels->digest_end(&line->hash) != item->digest;
            engine->kernels->digest_begin(&line->hash);
            end_item(engine, line, wrong ? ENGINE_DIGEST : ENGINE_DONE);
        } else if ((size_t)count < wanted) {
            break; /* That was all. */
        }
    }
    if (line->tls && budget == 0)
        look_again(engine, line);
    gather(line, item);
    /* Otherwise the socket stays watched: the next post is near. */
    if (!item && budget == TURN_BYTES)
        rest(engine, line);
}

static void send_posted(struct engine *engine, struct line *line) {
    size_t budget = TURN_BYTES;
    while (budget > 0) {
        struct item *item = first_of(engine, line);
        if (!item && !line->mark_due) {
            rest(engine, line);
            return;
        }
        struct iovec parts[2];
        size_t count = 0, wanted = 0;
        if (line->mark_due)
            parts[count++] = (struct iovec){&line->mark, 1};
        if (item)
            parts[count++] = (struct iovec){item->at, item->left < budget ? item->left : budget};
        for (size_t i = 0; i < count; i++)
            wanted += parts[i].iov_len;
        /* The mark of this payload follows at once, and would otherwise be a packet of its own. */
        ssize_t sent = bytes_out(line, parts, count, item ? MSG_MORE : 0);
        if (sent < 0) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK)
                fail(engine, line, errno);
            return;
        }
        size_t moved = (size_t)sent;
        line->moved_ms = now_ms();
        budget -= moved < budget ? moved : budget;
        if (line->mark_due && moved) {
            moved--;
            lock(engine);
            line->mark_due = 0;
            if (!line->dead && !busy(line))
                engine->pending--;
            unlock(engine);
        }
        if (item) {
            item->at += moved;
            item->left -= moved;
            if (item->left == 0 && !unchanged(item)) {
                fail(engine, line, ENGINE_CHANGED);
                return;
            }
            if (item->left == 0)
                end_item(engine, line, ENGINE_DONE);
        }
        if ((size_t)sent < wanted)
            return; /* The kernel has no more room. */
    }
}

static void move(struct engine *engine, uint64_t number) {
    lock(engine);
    struct line *line = *place_of(engine, number);
    if (line && line->dead)
        line = NULL;
    engine->moving = line;
    unlock(engine);
    if (!line)
        return;
    if (line->mark)
        send_posted(engine, line);
    else
        receive(engine, line);
    lock(engine);
    engine->moving = NULL;
    pthread_cond_broadcast(&engine->moved);
    unlock(engine);
}

static void look_for_stalls(struct engine *engine) {
    int64_t now = now_ms();
    lock(engine);
    for (size_t slot = 0; slot < SLOTS; slot++)
        for (struct line *line = engine->lines[slot]; line; line = line->next)
            if (!line->dead && busy(line) && now - line->moved_ms > line->limit_ms)
                kill_line(engine, line, ENGINE_STALLED);
            else if (!line->dead && busy(line) && now - line->moved_ms > line->limit_ms / 2)
                gather(line, NULL); /* A peer may be slow: whatever has come counts. */
    unlock(engine);
}

/* Lines whose bytes have arrived although their sockets need not say so. */
static void look_at_again(struct engine *engine) {
    uint64_t numbers[EVENTS];
    size_t count = 0;
    lock(engine);
    engine->again = 0;
    for (size_t slot = 0; slot < SLOTS; slot++)
        for (struct line *line = engine->lines[slot]; line; line = line->next)
            if (line->again && count < EVENTS) {
                line->again = 0;
                numbers[count++] = line->number;
            } else if (line->again) {
                engine->again = 1;
            }
    unlock(engine);
    for (size_t i = 0; i < count; i++)
        move(engine, numbers[i]);
}

int engine_run(struct engine *engine) {
    struct epoll_event events[EVENTS];
    int64_t look_ms = now_ms() + TICK_MS;
    while (!atomic_load(&engine->stopping)) {
        lock(engine);
        int again = engine->again;
        engine->drowsy = engine->pending == 0 && !again;
        int patience = again ? 0 : engine->drowsy ? -1 : TICK_MS;
        unlock(engine);
        int count = epoll_wait(engine->epoll, events, EVENTS, patience);
        if (count < 0 && errno != EINTR)
            return errno;
        for (int i = 0; i < count; i++) {
            if (events[i].data.u64)
                move(engine, events[i].data.u64);
            else
                silence(engine->alarm);
        }
        if (again)
            look_at_again(engine);
        if (now_ms() >= look_ms) {
            look_for_stalls(engine);
            look_ms = now_ms() + TICK_MS;
        }
    }
    return 0;
}

uint64_t engine_open(struct engine *engine, int socket, void *tls, unsigned char mark, int64_t limit_ms) {
    struct line *line = aligned_alloc(64, (sizeof *line + 63) / 64 * 64);
    if (!line)
        return 0;
    memset(line, 0, sizeof *line);
    engine->kernels->digest_begin(&line->hash);
    line->socket = socket;
    line->tls = tls;
    line->mark = mark;
    line->gathered = 1;
    line->limit_ms = limit_ms;
    line->last = &line->first;
    lock(engine);
    uint64_t number = owe(engine) ? ++engine->numbers : 0;
    if (number) {
        line->number = number;
        *place_of(engine, number) = line;
    }
    unlock(engine);
    if (!number)
        free(line);
    return number;
}

/* With the lock held, on a line with nothing to do: move what can be moved at once. Returns an enum engine_answer, which
 * is ENGINE_POSTED if something is left of the item. */

static int receive_now(struct engine *engine, struct line *line, struct item *item) {
    ssize_t count = bytes_in(line, item->at, item->left);
    if (count <= 0) {
        if (count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
            kill_line(engine, line, count == 0 ? ENGINE_CLOSED : errno);
            return ENGINE_REFUSED;
        }
        return ENGINE_POSTED;
    }
    if (item->digest)
        engine->kernels->digest_more(&line->hash, item->at, (size_t)count);
    item->at += count;
    item->left -= (size_t)count;
    if (item->left)
        return ENGINE_POSTED;
    int wrong = item->digest && engine->kernels->digest_end(&line->hash) != item->digest;
    engine->kernels->digest_begin(&line->hash);
    return wrong ? ENGINE_DIGEST_NOW : ENGINE_DONE_NOW;
}

static int send_now(struct engine *engine, struct line *line, struct item *item) {
    struct iovec part = {item->at, item->left}, mark = {&line->mark, 1};
    ssize_t count = bytes_out(line, &part, 1, MSG_MORE);
    if (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
        kill_line(engine, line, errno);
        return ENGINE_REFUSED;
    }
    item->at += count > 0 ? count : 0;
    item->left -= count > 0 ? (size_t)count : 0;
    if (item->left)
        return ENGINE_POSTED;
    if (!unchanged(item)) {
        kill_line(engine, line, ENGINE_CHANGED);
        return ENGINE_REFUSED;
    }
    if (bytes_out(line, &mark, 1, 0) != 1) {
        /* The engine finds out why. */
        line->mark_due = 1;
        line->moved_ms = now_ms();
        engine->pending++;
        watch(engine, line, 1);
    }
    return ENGINE_DONE_NOW;
}

int engine_post(struct engine *engine, uint64_t number, uint64_t name, void *memory, size_t size, uint64_t digest,
                const int64_t *guard, int64_t value) {
    struct item *item = malloc(sizeof *item);
    if (item)
        *item = (struct item){NULL, name, memory, size, digest, guard, value};
    int answer = ENGINE_REFUSED;
    lock(engine);
    struct line *line = *place_of(engine, number);
    if (line && !line->dead && !(item && owe(engine))) {
        /* The next item would get the bytes of this one. */
        kill_line(engine, line, ENOMEM);
    } else if (line && !line->dead) {
        answer = ENGINE_POSTED;
        if (size <= LITTLE_BYTES && !busy(line) && engine->moving != line)
            answer = line->mark ? send_now(engine, line, item) : receive_now(engine, line, item);
        if (answer != ENGINE_POSTED)
            engine->owed--;
    }
    if (answer == ENGINE_POSTED) {
        if (!busy(line)) {
            engine->pending++;
            line->moved_ms = now_ms();
        }
        *line->last = item;
        line->last = &item->next;
        item = NULL;
        int problem = watch(engine, line, 1);
        if (problem)
            kill_line(engine, line, problem);
        if (line->tls && !line->mark)
            line->again = engine->again = 1;
    }
    if ((engine->drowsy && engine->pending) || engine->again) {
        engine->drowsy = 0;
        ring(engine->alarm);
    }
    unlock(engine);
    free(item);
    return answer;
}

void engine_close(struct engine *engine, uint64_t number) {
    lock(engine);
    struct line **place = place_of(engine, number), *line = *place;
    if (line) {
        *place = line->next;
        if (!line->dead) {
            end_line(engine, line);
            engine->owed--;
        }
        while (engine->moving == line)
            pthread_cond_wait(&engine->moved, &engine->lock);
        drop_items(engine, line);
    }
    unlock(engine);
    if (line) {
        close(line->socket);
        free(line);
    }
}

size_t engine_reap(struct engine *engine, struct engine_done *done, size_t room) {
    lock(engine);
    size_t count = engine->done_count < room ? engine->done_count : room;
    for (size_t i = 0; i < count; i++)
        done[i] = engine->done[(engine->done_first + i) % engine->done_room];
    engine->done_count -= count;
    if (count)
        engine->done_first = (engine->done_first + count) % engine->done_room;
    if (engine->done_count == 0) {
        /* Also if it has not rung yet for what was just taken: it would ring for nothing, and for ever. */
        engine->rung = 0;
        silence(engine->bell);
    }
    unlock(engine);
    return count;
}

void engine_free(struct engine *engine) {
    for (size_t slot = 0; slot < SLOTS; slot++)
        while (engine->lines[slot])
            engine_close(engine, engine->lines[slot]->number);
    int held[] = {engine->epoll, engine->bell, engine->alarm};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++)
        if (held[i] >= 0)
            close(held[i]);
    pthread_mutex_destroy(&engine->lock);
    pthread_cond_destroy(&engine->moved);
    free(engine->done);
    free(engine);
}
