// A vLLM without a model, as quick as a core allows: one thread, epoll, fixed answers.
//
//     engine PORT [tokenizes]
//
// It has the routes that kvpin asks a vLLM for. A stream has `max_tokens` chunks, each in a write of its own. They come
// at once, or every N microseconds after `GET /mock/interval_us/N`, until `GET /mock/finish`. Each says when it was sent ("t", ns of
// CLOCK_MONOTONIC). With `tokenizes`, POST /tokenize gives one id for every four bytes of the body.
#include "http.h"

enum { LARGEST_HEAD = 65536, SLOTS = 4096 };

typedef struct Connection {
    int fd;
    bool waits_for_room, closes, in_wheel;
    Buffer in, out;
    int chunks_left;       // of the stream that is being answered; 0 if none is
    bool with_usage;
    size_t prompt_tokens;
    struct Connection *next;  // in its slot of the wheel
} Connection;

static int poller;
static bool tokenizes, finishing;
static uint64_t interval_ms, wheel_at;
static size_t in_wheel;
static Connection *wheel[SLOTS];  // streams by the millisecond in which their next chunk is due
static Buffer metrics;

static void watch(Connection *c, int how) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    if (c->waits_for_room) event.events |= EPOLLOUT;
    if (epoll_ctl(poller, how, c->fd, &event) < 0) die("epoll_ctl");
}

static void close_connection(Connection *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
    if (c->in_wheel) return;  // freed when its slot comes
    free(c->in.data);
    free(c->out.data);
    free(c);
}

// Sends what is waiting; false if the connection is gone.
static bool flush(Connection *c) {
    while (c->out.used) {
        ssize_t sent = write(c->fd, c->out.data, c->out.used);
        if (sent < 0) {
            if (errno != EAGAIN) return false;
            if (!c->waits_for_room) {
                c->waits_for_room = true;
                watch(c, EPOLL_CTL_MOD);
            }
            return true;
        }
        drop(&c->out, (size_t)sent);
    }
    if (c->waits_for_room) {
        c->waits_for_room = false;
        watch(c, EPOLL_CTL_MOD);
    }
    return !c->closes;
}

static void answer(Connection *c, const char *status, const char *type, const char *body, size_t size) {
    char head[256];
    int length = snprintf(head, sizeof head,
                          "HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n", status, type, size);
    append(&c->out, head, (size_t)length);
    append(&c->out, body, size);
}

static void json(Connection *c, const char *status, const char *body) {
    answer(c, status, "application/json", body, strlen(body));
}

static void event(Connection *c, const char *data, int size) {
    char frame[1024];
    int length = snprintf(frame, sizeof frame, "%x\r\n%.*s\r\n", size, size, data);
    append(&c->out, frame, (size_t)length);
}

static int usage(const Connection *c, char *text, size_t room, int completion) {
    return snprintf(text, room,
                    "\"usage\":{\"prompt_tokens\":%zu,\"total_tokens\":%zu,\"completion_tokens\":%d,"
                    "\"prompt_tokens_details\":{\"cached_tokens\":0}}",
                    c->prompt_tokens, c->prompt_tokens + (size_t)completion, completion);
}

static void schedule(Connection *c, uint64_t due_ms) {
    Connection **slot = &wheel[due_ms % SLOTS];
    c->next = *slot;
    c->in_wheel = true;
    *slot = c;
    in_wheel++;
}

#define CHUNK "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\","

// The next chunk, and after the last one the end; false if the connection is gone.
static bool next_chunk(Connection *c) {
    char data[512], figures[256];
    if (finishing) c->chunks_left = 1;
    int size = snprintf(data, sizeof data,
                        CHUNK "\"t\":%llu,\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},"
                              "\"logprobs\":null,\"finish_reason\":%s}]}\n\n",
                        (unsigned long long)now_ns(), c->chunks_left == 1 ? "\"length\"" : "null");
    event(c, data, size);
    if (--c->chunks_left == 0) {
        if (c->with_usage) {
            usage(c, figures, sizeof figures, 1);
            event(c, data, snprintf(data, sizeof data, CHUNK "\"choices\":[],%s}\n\n", figures));
        }
        event(c, "data: [DONE]\n\n", 14);
        append(&c->out, "0\r\n\r\n", 5);
    }
    return flush(c);
}

// Whether the body has "name":value, with or without a space.
static bool has(const char *body, size_t size, const char *name, const char *value) {
    const char *at = memmem(body, size, name, strlen(name));
    if (!at) return false;
    at += strlen(name);
    while (at < body + size && (*at == ':' || *at == ' ')) at++;
    return (size_t)(body + size - at) >= strlen(value) && !memcmp(at, value, strlen(value));
}

static int max_tokens(const char *body, size_t size) {
    const char *at = memmem(body, size, "\"max_tokens\":", 13);
    int count = at ? atoi(at + 13) : 1;
    return count > 0 ? count : 1;
}

static bool generate(Connection *c, const char *body, size_t size) {
    char text[1024], figures[256];
    c->prompt_tokens = size / 4;
    if (has(body, size, "\"cache_salt\"", "\"\"")) {
        json(c, "400 Bad Request",
             "{\"error\":{\"message\":\"Parameter 'cache_salt' must be a non-empty string if provided.\","
             "\"type\":\"BadRequestError\",\"param\":\"cache_salt\",\"code\":400}}");
        return flush(c);
    }
    if (!has(body, size, "\"stream\"", "true")) {
        usage(c, figures, sizeof figures, 1);
        snprintf(text, sizeof text,
                 "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"m\",\"choices\":"
                 "[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\" word\",\"refusal\":null,"
                 "\"tool_calls\":[]},\"text\":\" word\",\"logprobs\":null,\"finish_reason\":\"length\"}],"
                 "\"service_tier\":null,\"system_fingerprint\":null,%s}",
                 figures);
        json(c, "200 OK", text);
        return flush(c);
    }
    const char *head =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    append(&c->out, head, strlen(head));
    c->chunks_left = max_tokens(body, size);
    c->with_usage = has(body, size, "\"include_usage\"", "true");
    if (interval_ms) {
        bool alive = next_chunk(c);
        if (!in_wheel) wheel_at = now_ns() / 1000000;
        if (alive && c->chunks_left) schedule(c, wheel_at + interval_ms);
        return alive;
    }
    while (c->chunks_left)
        if (!next_chunk(c)) return false;
    return true;
}

static bool tokenize(Connection *c, const char *body, size_t size) {
    Buffer text = {0};
    char part[64];
    append(&text, part, (size_t)snprintf(part, sizeof part, "{\"count\":%zu,\"max_model_len\":131072,\"tokens\":[", size / 4));
    for (size_t at = 0; at + 4 <= size; at += 4) {
        uint32_t bytes;
        memcpy(&bytes, body + at, 4);
        append(&text, part, (size_t)snprintf(part, sizeof part, at ? ",%u" : "%u", bytes * 2654435761u % 150000u));
    }
    append(&text, "]}", 2);
    answer(c, "200 OK", "application/json", text.data, text.used);
    free(text.data);
    return flush(c);
}

static bool serve(Connection *c, const char *head, const char *body, size_t size) {
    bool posts = !strncmp(head, "POST ", 5), gets = !strncmp(head, "GET ", 4);
    const char *path = head + (posts ? 5 : 4);
    size_t length = strcspn(path, " ?");
#define AT(route) (length == strlen(route) && !memcmp(path, route, length))
    if (!posts && !gets) {  // another protocol is tried out
        c->closes = true;
        json(c, "400 Bad Request", "{}");
    } else if (posts && (AT("/v1/chat/completions") || AT("/v1/completions") || AT("/v1/responses") || AT("/v1/messages")))
        return generate(c, body, size);
    else if (tokenizes && AT("/tokenize") && posts)
        return tokenize(c, body, size);
    else if (tokenizes && AT("/tokenize"))
        json(c, "405 Method Not Allowed", "{}");
    else if (AT("/health"))
        answer(c, "200 OK", "text/plain", "", 0);
    else if (AT("/v1/models"))
        json(c, "200 OK", "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"max_model_len\":131072}]}");
    else if (AT("/version"))
        json(c, "200 OK", "{\"version\":\"0.32.0\"}");
    else if (AT("/metrics"))
        answer(c, "200 OK", "text/plain; version=0.0.4; charset=utf-8", metrics.data, metrics.used);
    else if (!strncmp(path, "/mock/interval_us/", 18)) {
        interval_ms = (uint64_t)atoll(path + 18) / 1000 % SLOTS;
        finishing = false;
        json(c, "200 OK", "{}");
    } else if (AT("/mock/finish")) {
        finishing = interval_ms > 0;
        json(c, "200 OK", "{}");
    } else
        json(c, "404 Not Found", "{\"detail\":\"Not Found\"}");
    return flush(c);
}

// Serves every complete request; false if the connection is gone.
static bool serve_all(Connection *c) {
    size_t head;
    while (!c->chunks_left && (head = head_length(c->in.data, c->in.used))) {
        const char *value = header(c->in.data, head, "content-length:");
        size_t size = value ? strtoull(value, NULL, 10) : 0;
        if (header(c->in.data, head, "transfer-encoding:")) {
            c->closes = true;
            json(c, "411 Length Required", "{}");
            return flush(c);
        }
        if (c->in.used < head + size) return true;
        bool alive = serve(c, c->in.data, c->in.data + head, size);
        if (!alive) return false;
        drop(&c->in, head + size);
    }
    return c->in.used < LARGEST_HEAD || head_length(c->in.data, c->in.used);
}

static void on_event(Connection *c, uint32_t events) {
    static char data[1 << 17];
    bool alive = true;
    if (events & EPOLLOUT) alive = flush(c);
    if (alive && events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        ssize_t got = read(c->fd, data, sizeof data);
        if (got > 0) {
            append(&c->in, data, (size_t)got);
            alive = serve_all(c);
        } else
            alive = got < 0 && errno == EAGAIN;
    }
    if (!alive) close_connection(c);
}

// Sends the chunks that are due.
static void turn_wheel(void) {
    uint64_t now = now_ns() / 1000000;
    for (; in_wheel && wheel_at < now; wheel_at++) {
        Connection *c = wheel[(wheel_at + 1) % SLOTS];
        wheel[(wheel_at + 1) % SLOTS] = NULL;
        for (Connection *next; c; c = next) {
            next = c->next;
            c->in_wheel = false;
            in_wheel--;
            if (c->fd < 0 || !next_chunk(c)) {
                close_connection(c);
                continue;
            }
            if (c->chunks_left)
                schedule(c, wheel_at + 1 + interval_ms);
            else if (!serve_all(c))
                close_connection(c);
        }
    }
}

// A page as long as a real one: kvpin needs eight lines of it.
static void make_metrics(void) {
    char line[512];
#define LINE(...) append(&metrics, line, (size_t)snprintf(line, sizeof line, __VA_ARGS__))
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    LINE("process_start_time_seconds %lld.%02ld\n", (long long)now.tv_sec, now.tv_nsec / 10000000);
    const char *labels = "engine=\"0\",model_name=\"m\"";
    const char *names[] = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
                           "prefix_cache_queries_total", "prefix_cache_hits_total"};
    for (int at = 0; at < 5; at++) LINE("# TYPE vllm:%s gauge\nvllm:%s{%s} 0.0\n", names[at], names[at], labels);
    LINE("vllm:prefix_cache_queries_created{%s} %lld.0\n", labels, (long long)now.tv_sec);
    LINE("vllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"True\",engine=\"0\",num_gpu_blocks=\"60001\"} 1.0\n");
    for (int histogram = 0; histogram < 20; histogram++) {
        LINE("# HELP vllm:histogram_%d_seconds A histogram.\n# TYPE vllm:histogram_%d_seconds histogram\n", histogram, histogram);
        for (int bucket = 0; bucket < 16; bucket++)
            LINE("vllm:histogram_%d_seconds_bucket{%s,le=\"%d.0\"} 0.0\n", histogram, labels, 1 << bucket);
        LINE("vllm:histogram_%d_seconds_count{%s} 0.0\nvllm:histogram_%d_seconds_sum{%s} 0.0\n", histogram, labels, histogram, labels);
    }
}

int main(int count, char **words) {
    if (count < 2) {
        fprintf(stderr, "usage: engine PORT [tokenizes]\n");
        return 2;
    }
    tokenizes = count > 2 && !strcmp(words[2], "tokenizes");
    raise_file_limit();
    make_metrics();
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_in address = local(atoi(words[1]));
    if (bind(listener, (struct sockaddr *)&address, sizeof address) < 0) die("bind");
    if (listen(listener, 4096) < 0 || fcntl(listener, F_SETFL, O_NONBLOCK) < 0) die("listen");
    poller = epoll_create1(0);
    struct epoll_event events[256], accepts = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &accepts);
    for (;;) {
        int ready = epoll_wait(poller, events, 256, in_wheel ? 1 : -1);
        for (int at = 0; at < ready; at++) {
            if (events[at].data.ptr) {
                on_event(events[at].data.ptr, events[at].events);
                continue;
            }
            for (int fd; (fd = accept(listener, NULL, NULL)) >= 0;) {
                ready_socket(fd);
                Connection *c = calloc(1, sizeof *c);
                if (!c) die("calloc");
                c->fd = fd;
                watch(c, EPOLL_CTL_ADD);
            }
        }
        turn_wheel();  // last: it frees connections, which the events above may name
    }
}
