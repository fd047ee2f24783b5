/* See link.h. */
#define _GNU_SOURCE
#include "link.h"
#include "tls.h"

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define XXH_STATIC_LINKING_ONLY
#include "xxhash.h"

enum {
    HEAD = 16,
    BUFFER = 64 << 10,       /* of what has come and was not asked for yet: heads, bodies, little payloads */
    TURN_BYTES = 4 << 20,    /* that one call may move */
    PIECE_BYTES = 512 << 10, /* received at once, so that they are in the cache when their digest is made */
    LITTLE_BYTES = 64 << 10, /* payload that is copied, and sent with its frame */
    PIECES = 256,
    VECTORS = 64,
    WHOLE = '.',
};

enum phase { AT_HEAD, AT_BODY, AT_FRAME, AT_PAYLOAD, AT_MARK };

struct piece {
    unsigned char *at;
    size_t left;
    uint64_t digest;
};

struct frame {
    struct frame *next;
    size_t count, first; /* parts, and the one that is being sent */
    int guarded;         /* the mark waits until all before it has left and is unchanged */
    struct link_part *guards;
    size_t guard_count;
    struct link_part parts[];
};

struct link {
    struct link_face face;
    XXH3_state_t hash; /* of the first piece's bytes so far */
    const struct kernels *kernels;
    int socket, dry, gathered, out_error;
    void *tls;
    size_t tls_pending;
    uint32_t most;
    enum phase phase;
    size_t start, end; /* of what is in the buffer */
    uint64_t payload_left, posted_left; /* bytes of payload that have not come, and of those that have a place */
    unsigned char *body;
    size_t body_filled, body_room;
    struct piece pieces[PIECES];
    uint64_t posted;
    struct frame *frames, **last;
    unsigned char buffer[BUFFER];
};

struct link *link_new(const struct kernels *kernels, int socket, void *tls, uint32_t most) {
    struct link *link = aligned_alloc(64, (sizeof *link + 63) / 64 * 64);
    if (!link)
        return NULL;
    memset(link, 0, offsetof(struct link, buffer));
    link->kernels = kernels;
    kernels->digest_begin(&link->hash);
    link->socket = socket;
    link->tls = tls;
    link->most = most;
    link->gathered = 1;
    link->last = &link->frames;
    return link;
}

struct link_face *link_face(struct link *link) { return &link->face; }

static void drop_frames(struct link *link) {
    while (link->frames) {
        struct frame *frame = link->frames;
        link->frames = frame->next;
        free(frame);
    }
    link->last = &link->frames;
    link->face.sending = 0;
}

void link_free(struct link *link) {
    drop_frames(link);
    free(link->body);
    free(link);
}

static int die(struct link *link, int status) {
    if (!link->face.status)
        link->face.status = status;
    drop_frames(link);
    return LINK_DEAD;
}

/* Out */

static int unchanged(const struct link_part *part) {
    if (!part->guard)
        return 1;
    /* Not before the bytes were read. */
    atomic_thread_fence(memory_order_acquire);
    return __atomic_load_n(part->guard, __ATOMIC_ACQUIRE) == part->value;
}

int link_send(struct link *link, int kind, const void *body, size_t size, const struct link_part *parts, size_t count) {
    static const unsigned char mark = WHOLE;
    uint64_t payload = 0;
    size_t guards = 0;
    for (size_t i = 0; i < count; i++) {
        payload += parts[i].size;
        guards += parts[i].guard != NULL;
    }
    int little = payload <= LITTLE_BYTES;
    size_t copied = HEAD + size + (little && payload ? payload + 1 : 0);
    size_t room = sizeof(struct frame) + (count + 2 + guards) * sizeof(struct link_part);
    struct frame *frame = link->face.status ? NULL : malloc(room + copied);
    if (!frame) {
        die(link, ENOMEM);
        return link->face.status;
    }
    unsigned char *start = (unsigned char *)frame + room, *to = start + HEAD + size;
    uint32_t body_size = (uint32_t)size;
    memset(start, 0, 4);
    start[0] = (unsigned char)kind;
    memcpy(start + 4, &body_size, 4);
    memcpy(start + 8, &payload, 8);
    if (size)
        memcpy(start + HEAD, body, size);
    *frame = (struct frame){.count = 1, .guards = (struct link_part *)(start - guards * sizeof(struct link_part))};
    frame->parts[0] = (struct link_part){start, copied, NULL, 0};
    for (size_t i = 0; i < count; i++) {
        if (little) {
            memcpy(to, parts[i].at, parts[i].size);
            to += parts[i].size;
            if (!unchanged(&parts[i])) {
                free(frame);
                die(link, LINK_CHANGED);
                return LINK_CHANGED;
            }
        } else if (parts[i].size) {
            frame->parts[frame->count++] = parts[i];
            if (parts[i].guard)
                frame->guards[frame->guard_count++] = parts[i];
        }
    }
    if (little && payload)
        *to = WHOLE;
    else if (payload)
        frame->parts[frame->count++] = (struct link_part){&mark, 1, NULL, 0};
    frame->guarded = frame->guard_count > 0;
    *link->last = frame;
    link->last = &frame->next;
    link->face.sending = 1;
    return 0;
}

static ssize_t bytes_out(struct link *link, struct iovec *parts, size_t count, int flags) {
    if (!link->tls) {
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
        return sendmsg(link->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL | flags);
    }
    ssize_t sent = 0;
    for (size_t i = 0; i < count; i++) {
        ptrdiff_t left =
            shardline_tls_send(link->tls, link->socket, parts[i].iov_base, parts[i].iov_len, &link->tls_pending, 0);
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

/* 0, or LINK_DEAD. An error of the socket shows when it is read: what the peer said before is to be heard. */
static int move_out(struct link *link) {
    size_t budget = TURN_BYTES;
    while (link->frames && budget) {
        struct iovec vectors[VECTORS];
        size_t count = 0, wanted = 0;
        int more = 0;
        for (struct frame *frame = link->frames; frame && count < VECTORS && wanted < budget && !more; frame = frame->next)
            for (size_t i = frame->first; i < frame->count && count < VECTORS && wanted < budget; i++) {
                if (frame->guarded && i + 1 == frame->count) {
                    if (count) {
                        more = MSG_MORE; /* The mark follows at once. */
                        break;
                    }
                    for (size_t guard = 0; guard < frame->guard_count; guard++)
                        if (!unchanged(&frame->guards[guard]))
                            return die(link, LINK_CHANGED);
                    frame->guarded = 0;
                }
                vectors[count++] = (struct iovec){(void *)frame->parts[i].at, frame->parts[i].size};
                wanted += frame->parts[i].size;
            }
        ssize_t sent = bytes_out(link, vectors, count, more);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                link->out_error = errno;
                drop_frames(link);
            }
            return 0;
        }
        link->face.moved += (uint64_t)sent;
        budget -= (size_t)sent < budget ? (size_t)sent : budget;
        int full = (size_t)sent < wanted;
        while (sent > 0) {
            struct frame *frame = link->frames;
            struct link_part *part = &frame->parts[frame->first];
            size_t done = (size_t)sent < part->size ? (size_t)sent : part->size;
            part->at += done;
            part->size -= done;
            sent -= (ssize_t)done;
            if (part->size == 0 && ++frame->first == frame->count) {
                link->frames = frame->next;
                if (!link->frames)
                    link->last = &link->frames;
                link->face.sent++;
                free(frame);
            }
        }
        if (full)
            break;
    }
    link->face.sending = link->frames != NULL;
    return 0;
}

/* In */

int link_expect(struct link *link, void *memory, size_t size, uint64_t digest) {
    if (link->face.status)
        return link->face.status;
    if (link->posted - link->face.got == PIECES || size == 0 || size > link->payload_left - link->posted_left) {
        die(link, LINK_MISFIT);
        return LINK_MISFIT;
    }
    link->pieces[link->posted++ % PIECES] = (struct piece){memory, size, digest};
    link->posted_left += size;
    return 0;
}

void link_take(struct link *link) {
    if (link->phase != AT_FRAME)
        return;
    link->phase = link->payload_left ? AT_PAYLOAD : AT_HEAD;
}

/* As recv(): never waits. */
static ssize_t bytes_in(struct link *link, struct iovec *vectors, size_t count) {
    if (link->dry) {
        errno = EAGAIN;
        return -1;
    }
    size_t wanted = 0;
    for (size_t i = 0; i < count; i++)
        wanted += vectors[i].iov_len;
    ssize_t came;
    do {
        if (link->tls) {
            wanted = vectors[0].iov_len;
            came = shardline_tls_receive(link->tls, link->socket, vectors[0].iov_base, wanted, 0);
            errno = came < 0 ? (int)-came : 0;
            came = came < 0 ? -1 : came;
        } else {
            struct msghdr message = {.msg_iov = vectors, .msg_iovlen = count};
            came = recvmsg(link->socket, &message, MSG_DONTWAIT);
        }
    } while (came < 0 && errno == EINTR);
    if (came > 0)
        link->face.moved += (uint64_t)came;
    link->dry = came > 0 && (size_t)came < wanted;
    return came;
}

/* After a read that brought nothing: 0 if it would have waited, or LINK_DEAD. */
static int nothing(struct link *link, ssize_t came) {
    if (came < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        link->dry = 1;
        return LINK_IDLE;
    }
    return die(link, link->out_error ? link->out_error : came ? errno : LINK_CLOSED);
}

/* More bytes in the buffer: 0, or a state. */
static int fill(struct link *link, int *blocked) {
    if (link->start) {
        memmove(link->buffer, link->buffer + link->start, link->end - link->start);
        link->end -= link->start;
        link->start = 0;
    }
    struct iovec vector = {link->buffer + link->end, BUFFER - link->end};
    ssize_t came = bytes_in(link, &vector, 1);
    if (came <= 0) {
        *blocked = 1;
        return nothing(link, came);
    }
    link->end += (size_t)came;
    return 0;
}

static int read_head(struct link *link) {
    const unsigned char *head = link->buffer + link->start;
    memcpy(&link->face.body_size, head + 4, 4);
    memcpy(&link->face.payload, head + 8, 8);
    link->face.kind = head[0];
    if (head[1] | head[2] | head[3] || link->face.body_size > link->most || link->face.payload >> 56)
        return die(link, LINK_MALFORMED);
    link->start += HEAD;
    link->payload_left = link->face.payload;
    link->body_filled = 0;
    link->phase = AT_BODY;
    return 0;
}

/* Memory for a body is taken for bytes that have come, never for a length that was announced. */
static int read_body(struct link *link) {
    size_t size = link->face.body_size, there = link->end - link->start;
    if (size <= BUFFER) {
        if (there < size)
            return 0;
        link->face.body = link->buffer + link->start;
        link->start += size;
        link->phase = AT_FRAME;
        return 1;
    }
    size_t taken = there < size - link->body_filled ? there : size - link->body_filled;
    if (link->body_filled + taken > link->body_room) {
        size_t room = 2 * (link->body_filled + taken);
        unsigned char *body = realloc(link->body, room < size ? room : size);
        if (!body)
            return die(link, ENOMEM);
        link->body = body;
        link->body_room = room < size ? room : size;
    }
    memcpy(link->body + link->body_filled, link->buffer + link->start, taken);
    link->start += taken;
    link->body_filled += taken;
    if (link->body_filled < size)
        return 0;
    link->face.body = link->body;
    link->phase = AT_FRAME;
    return 1;
}

static void came_in(struct link *link, struct piece *piece, const unsigned char *bytes, size_t count) {
    if (piece->digest)
        link->kernels->digest_more(&link->hash, (void *)bytes, count);
    piece->at += piece->at ? count : 0;
    piece->left -= count;
    link->payload_left -= count;
    link->posted_left -= count;
    if (piece->left)
        return;
    uint64_t number = link->face.got++;
    link->face.wrong[number % PIECES] = piece->digest && link->kernels->digest_end(&link->hash) != piece->digest;
    if (piece->digest)
        link->kernels->digest_begin(&link->hash);
    if (!link->payload_left)
        link->phase = AT_MARK;
}

/* Payload into its place, from the buffer or straight from the socket; the rest of the buffer takes what is behind it. */
static int read_payload(struct link *link, size_t *budget, int *blocked) {
    struct piece *piece = &link->pieces[link->face.got % PIECES];
    size_t there = link->end - link->start;
    if (there || !piece->at || piece->left < HEAD) {
        if (!there)
            return fill(link, blocked);
        size_t count = there < piece->left ? there : piece->left;
        const unsigned char *from = link->buffer + link->start;
        if (piece->at)
            memcpy(piece->at, from, count);
        link->start += count;
        came_in(link, piece, from, count);
        return 0;
    }
    link->start = link->end = 0;
    size_t wanted = piece->left < PIECE_BYTES ? piece->left : PIECE_BYTES;
    struct iovec vectors[2] = {{piece->at, wanted}, {link->buffer, BUFFER}};
    ssize_t came = bytes_in(link, vectors, wanted == link->payload_left ? 2 : 1);
    if (came <= 0) {
        *blocked = 1;
        return nothing(link, came);
    }
    size_t count = (size_t)came < wanted ? (size_t)came : wanted;
    link->end = (size_t)came - count;
    *budget -= (size_t)came < *budget ? (size_t)came : *budget;
    came_in(link, piece, piece->at, count);
    return 0;
}

/* Have the kernel wake us for many bytes at once, but never for more than are sure to come. */
static void gather(struct link *link) {
    if (link->tls)
        return; /* How many records they come in is not known. */
    uint64_t due = link->phase == AT_PAYLOAD ? link->payload_left : 1;
    int wanted = due < PIECE_BYTES ? (int)due : PIECE_BYTES;
    if (wanted != link->gathered && !setsockopt(link->socket, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted))
        link->gathered = wanted;
}

int link_move(struct link *link, int ready) {
    if (ready)
        link->dry = 0;
    if (!link->face.status && link->frames && move_out(link))
        return LINK_DEAD;
    size_t budget = TURN_BYTES;
    int blocked = 0;
    while (!link->face.status) {
        if (link->phase == AT_FRAME)
            return LINK_FRAME;
        if (link->phase == AT_PAYLOAD && link->posted == link->face.got)
            return LINK_HUNGRY;
        if (!budget)
            return LINK_TURN;
        int state = 0;
        if (link->phase == AT_PAYLOAD) {
            state = read_payload(link, &budget, &blocked);
        } else if (link->phase == AT_MARK && link->end > link->start) {
            if (link->buffer[link->start++] != WHOLE)
                return die(link, LINK_MALFORMED);
            link->face.whole++;
            link->phase = AT_HEAD;
        } else if (link->phase == AT_HEAD && link->end - link->start >= HEAD) {
            state = read_head(link);
        } else if (link->phase != AT_BODY || !(state = read_body(link))) {
            state = fill(link, &blocked);
        }
        if (state == LINK_DEAD)
            return LINK_DEAD;
        if (blocked) {
            gather(link);
            return LINK_IDLE;
        }
    }
    return LINK_DEAD;
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int link_wait(struct link *link, int bell, int wait_ms) {
    int64_t end_ms = now_ms() + wait_ms;
    struct link_face before = {.got = link->face.got, .whole = link->face.whole, .sent = link->face.sent};
    int ready = 0;
    for (;;) {
        int state = link_move(link, ready);
        if (state != LINK_IDLE && state != LINK_TURN)
            return state;
        if (link->face.got != before.got || link->face.whole != before.whole || link->face.sent != before.sent)
            return LINK_MOVED;
        if (state == LINK_TURN)
            continue;
        int64_t left_ms = end_ms - now_ms();
        struct pollfd polled[2] = {{link->socket, (short)(POLLIN | (link->frames ? POLLOUT : 0)), 0}, {bell, POLLIN, 0}};
        int found = poll(polled, bell < 0 ? 1 : 2, left_ms > 0 ? (int)left_ms : 0);
        if (found == 0)
            return LINK_LATE;
        if (found < 0 && errno != EINTR)
            return die(link, errno);
        if (found > 0 && polled[1].revents && bell >= 0) {
            uint64_t rung;
            if (read(bell, &rung, sizeof rung) > 0)
                return LINK_BELL;
        }
        ready = 1;
    }
}
