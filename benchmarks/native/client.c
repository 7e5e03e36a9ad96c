// A load generator: one thread, epoll, `--connections` clients that each send their next chat once the last is answered.
//
//     client PORT CONNECTIONS REQUESTS BODIES [OPEN_PER_S]
//
// BODIES is a file of request bodies, each after its length (4 bytes, little endian); they are sent in turn.
// OPEN_PER_S limits how many connections begin in a second, 0 = all at once. Prints one line of JSON at the end: times in
// µs from the first byte sent to the last byte received, errors, and how late streamed chunks were ("t" in their text, see
// engine.c). With OPEN_PER_S each connection sends one request; a line "open" says that all have their first chunk, and
// chunks count from then until the first stream ends.
#include "http.h"

enum { LARGEST_HEAD = 16384, KEPT_ERRORS = 5, BUCKETS = 64 * 64 };
typedef enum { HEAD, LENGTH, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER, UNTIL_CLOSE } State;

typedef struct {
    int fd;
    State state;
    bool connecting, busy, waits_for_room, closes, began;
    size_t request, sent, left;  // bytes of the answer or chunk that are still to come
    uint64_t begun;
    Buffer in;
    int matched;      // of "t":
    uint64_t digits;  // after it
    int done;         // of [DONE]
} Client;

static int poller, port;
static Client *clients;
static size_t total, next_request, answered, failed, retried, streams_begun, chunks;
static const char **bodies;
static uint32_t *sizes;
static size_t body_count;
static uint64_t *took_us;
static uint64_t delays[BUCKETS], worst_delay_ns;
static char errors[KEPT_ERRORS][160];
static bool opens_slowly, counts = true;  // chunks count from the moment all streams are open until the first ends
static uint64_t window_begun, window_ended;
static size_t expected_streams;

static void connect_client(Client *c);
static bool begin(Client *c);
static void end_window(void);

static void watch(Client *c, int how) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    if (c->waits_for_room || c->connecting) event.events |= EPOLLOUT;
    if (epoll_ctl(poller, how, c->fd, &event) < 0) die("epoll_ctl");
}

static void hang_up(Client *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
    c->in.used = 0;
    c->waits_for_room = c->connecting = false;
}

static void fail(Client *c, const char *what, const char *detail, size_t size) {
    if (failed < KEPT_ERRORS) {
        snprintf(errors[failed], sizeof errors[0], "%s %.*s", what, (int)(size > 120 ? 120 : size), detail);
        for (char *at = errors[failed]; *at; at++)
            if (*at < ' ' || *at == '"' || *at == '\\') *at = ' ';
    }
    failed++;
    end_window();
    c->busy = false;
    hang_up(c);
}

static void end_window(void) {
    if (!opens_slowly || !counts) return;
    counts = false;
    window_ended = now_ns();
}

// The bucket of a delay: 64 of equal width for every power of two.
static size_t bucket(uint64_t delay_us) {
    if (delay_us < 64) return delay_us;
    int power = 63 - __builtin_clzll(delay_us);
    return (size_t)(power - 5) * 64 + (delay_us >> (power - 6)) - 64;
}

static uint64_t bucket_us(size_t at) {
    return at < 64 ? at : (64 + at % 64) << (at / 64 - 1);
}

static void note_chunk(uint64_t sent_ns, uint64_t now) {
    uint64_t delay = now > sent_ns ? now - sent_ns : 0;
    if (!counts) return;
    chunks++;
    delays[bucket(delay / 1000)]++;
    if (delay > worst_delay_ns) worst_delay_ns = delay;
}

// Looks for the times of chunks and for the end of the stream.
static void read_body(Client *c, const char *data, size_t size, uint64_t now) {
    static const char time_name[] = "\"t\":", done[] = "[DONE]";
    for (size_t at = 0; at < size; at++) {
        char byte = data[at];
        if (c->matched == 4) {
            if (byte >= '0' && byte <= '9') {
                c->digits = c->digits * 10 + (uint64_t)(byte - '0');
                continue;
            }
            note_chunk(c->digits, now);
            c->matched = 0;
        }
        if (c->matched < 4) c->matched = byte == time_name[c->matched] ? c->matched + 1 : byte == '"';
        if (c->matched == 4) c->digits = 0;
        if (c->done < 6) c->done = byte == done[c->done] ? c->done + 1 : byte == '[';
    }
}

static void finish(Client *c) {
    if (opens_slowly && c->done < 6) {
        fail(c, "a stream ended early", "", 0);
        return;
    }
    took_us[answered++] = (now_ns() - c->begun) / 1000;
    end_window();
    c->busy = false;
    if (c->closes) hang_up(c);
}

static void open_line(void) {
    if (!opens_slowly || window_begun || streams_begun + failed < expected_streams || answered) return;
    counts = true;
    window_begun = now_ns();
    puts("open");
    fflush(stdout);
}

// The head of an answer; false if it is no answer.
static bool read_head(Client *c, size_t size) {
    const char *head = c->in.data, *value;
    if (size < 12 || strncmp(head, "HTTP/1.1 200", 12)) {
        fail(c, "answered with", head, c->in.used);
        return false;
    }
    value = header(head, size, "connection:");
    c->closes = value && !strncasecmp(value, "close", 5);
    if (header(head, size, "transfer-encoding:"))
        c->state = CHUNK_SIZE;
    else if ((value = header(head, size, "content-length:"))) {
        c->state = LENGTH;
        c->left = strtoull(value, NULL, 10);
    } else
        c->state = UNTIL_CLOSE;
    return true;
}

// Reads what has arrived; true while the answer is not complete.
static bool read_answer(Client *c, uint64_t now) {
    size_t at = 0;
    bool goes_on = true;
    while (goes_on) {
        const char *data = c->in.data + at;
        size_t size = c->in.used - at, length;
        if (c->state == HEAD) {
            if (!(length = head_length(data, size))) break;
            if (!read_head(c, length)) return false;
            at += length;
            goes_on = !(c->state == LENGTH && !c->left);
        } else if (c->state == LENGTH || c->state == CHUNK_DATA || c->state == UNTIL_CLOSE) {
            if (!size) break;
            length = c->state == UNTIL_CLOSE || size < c->left ? size : c->left;
            if (!c->began) {
                c->began = true;
                streams_begun++;
            }
            read_body(c, data, length, now);
            at += length;
            c->left -= c->state == UNTIL_CLOSE ? 0 : length;
            if (c->state == LENGTH) goes_on = c->left;
            if (c->state == CHUNK_DATA && !c->left) c->state = CHUNK_END;
        } else {  // a line
            const char *end = memchr(data, '\n', size);
            if (!end) break;
            at += (size_t)(end - data) + 1;
            if (c->state == CHUNK_SIZE) {
                c->left = strtoull(data, NULL, 16);
                c->state = c->left ? CHUNK_DATA : TRAILER;
            } else if (c->state == CHUNK_END)
                c->state = CHUNK_SIZE;
            else
                goes_on = end - data > 1;
        }
    }
    drop(&c->in, at);
    if (goes_on) return true;
    finish(c);
    return false;
}

// Sends what is left of the request.
static bool send_request(Client *c) {
    size_t which = c->request % body_count;
    char head[256];
    size_t length = (size_t)snprintf(head, sizeof head,
                                     "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n"
                                     "content-type: application/json\r\naccept: */*\r\ncontent-length: %u\r\n\r\n",
                                     port, sizes[which]);
    while (c->sent < length + sizes[which]) {
        struct iovec { const void *base; size_t size; } parts[2];
        size_t in_head = c->sent < length ? length - c->sent : 0;
        size_t of_body = c->sent > length ? c->sent - length : 0;
        parts[0] = (struct iovec){head + (length - in_head), in_head};
        parts[1] = (struct iovec){bodies[which] + of_body, sizes[which] - of_body};
        struct msghdr message = {.msg_iov = (void *)parts, .msg_iovlen = 2};
        ssize_t sent = sendmsg(c->fd, &message, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN) return false;
            if (!c->waits_for_room) {
                c->waits_for_room = true;
                watch(c, EPOLL_CTL_MOD);
            }
            return true;
        }
        c->sent += (size_t)sent;
    }
    if (c->waits_for_room) {
        c->waits_for_room = false;
        watch(c, EPOLL_CTL_MOD);
    }
    return true;
}

// Sends the next request; false if none is left.
static bool begin(Client *c) {
    if (next_request == total || (opens_slowly && c->began)) {
        hang_up(c);
        return false;
    }
    c->request = next_request++;
    c->sent = 0;
    c->state = HEAD;
    c->busy = true;
    c->began = c->closes = false;
    c->matched = c->done = 0;
    c->begun = now_ns();
    if (c->fd < 0)
        connect_client(c);
    else if (!send_request(c))
        fail(c, "cannot send", "", 0);
    return true;
}

static void connect_client(Client *c) {
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0) die("socket");
    ready_socket(c->fd);
    struct sockaddr_in address = local(port);
    c->connecting = connect(c->fd, (struct sockaddr *)&address, sizeof address) < 0;
    if (c->connecting && errno != EINPROGRESS) {
        fail(c, "cannot connect", "", 0);
        return;
    }
    watch(c, EPOLL_CTL_ADD);
    if (!c->connecting && !send_request(c)) fail(c, "cannot send", "", 0);
}

static void on_event(Client *c, uint32_t events) {
    static char data[1 << 17];
    if (c->fd < 0) return;
    if (events & EPOLLOUT) {
        if (c->connecting) {
            c->connecting = false;
            watch(c, EPOLL_CTL_MOD);
        }
        if (!send_request(c)) {
            fail(c, "cannot send", strerror(errno), 40);
            return;
        }
    }
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    ssize_t got = read(c->fd, data, sizeof data);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        if (!c->busy)
            hang_up(c);
        else if (c->state == UNTIL_CLOSE)
            finish(c);
        else if (c->state == HEAD && !c->in.used && answered && !opens_slowly) {  // an idle connection was closed as we sent
            retried++;
            hang_up(c);
            c->sent = 0;
            connect_client(c);
        } else
            fail(c, "the connection was closed", "", 0);
        return;
    }
    append(&c->in, data, (size_t)got);
    if (c->state == HEAD && c->in.used > LARGEST_HEAD && !head_length(c->in.data, c->in.used))
        fail(c, "a head without end", "", 0);
    else
        read_answer(c, now_ns());
}

static void read_bodies(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) die(path);
    for (uint32_t size; fread(&size, sizeof size, 1, file) == 1; body_count++) {
        char *body = malloc(size + 1);
        if (!body || fread(body, 1, size, file) != size) die(path);
        bodies = realloc(bodies, (body_count + 1) * sizeof *bodies);
        sizes = realloc(sizes, (body_count + 1) * sizeof *sizes);
        bodies[body_count] = body;
        sizes[body_count] = size;
    }
    fclose(file);
    if (!body_count) die("no bodies");
}

static void report(double wall_s) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu_s = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                   (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    printf("{\"wall_s\":%.6f,\"cpu_s\":%.6f,\"failed\":%zu,\"retried\":%zu,\"chunks\":%zu,\"window_s\":%.6f,"
           "\"worst_delay_us\":%llu,\"took_us\":[",
           wall_s, cpu_s, failed, retried, chunks, (double)(window_ended - window_begun) / 1e9,
           (unsigned long long)(worst_delay_ns / 1000));
    for (size_t at = 0; at < answered; at++) printf("%s%llu", at ? "," : "", (unsigned long long)took_us[at]);
    printf("],\"delays_us\":[");
    for (size_t at = 0, some = 0; at < BUCKETS; at++)
        if (delays[at]) printf("%s[%llu,%llu]", some++ ? "," : "", (unsigned long long)bucket_us(at), (unsigned long long)delays[at]);
    printf("],\"errors\":[");
    for (size_t at = 0; at < failed && at < KEPT_ERRORS; at++) printf("%s\"%s\"", at ? "," : "", errors[at]);
    printf("]}\n");
}

int main(int count, char **words) {
    if (count < 5) {
        fprintf(stderr, "usage: client PORT CONNECTIONS REQUESTS BODIES [OPEN_PER_S]\n");
        return 2;
    }
    raise_file_limit();
    port = atoi(words[1]);
    size_t connections = (size_t)atol(words[2]), opened = 0;
    total = (size_t)atol(words[3]);
    read_bodies(words[4]);
    double per_s = count > 5 ? atof(words[5]) : 0;
    opens_slowly = per_s > 0;
    counts = !opens_slowly;
    expected_streams = connections;
    clients = calloc(connections, sizeof *clients);
    took_us = calloc(total, sizeof *took_us);
    poller = epoll_create1(0);
    for (size_t at = 0; at < connections; at++) clients[at].fd = -1;
    struct epoll_event events[256];
    uint64_t begun = now_ns();
    while (answered + failed < total) {
        size_t due = opens_slowly ? (size_t)((double)(now_ns() - begun) / 1e9 * per_s) + 1 : connections;
        for (; opened < connections && opened < due; opened++) begin(&clients[opened]);
        int ready = epoll_wait(poller, events, 256, opened < connections ? 1 : 1000);
        for (int at = 0; at < ready; at++) {
            Client *c = events[at].data.ptr;
            on_event(c, events[at].events);
            if (!c->busy) begin(c);
        }
        open_line();
    }
    report((double)(now_ns() - begun) / 1e9);
}
