/* An OpenAI-compatible streaming server whose latencies are known, to hold clients against.
 *
 *   known_server PORT TTFT_MS ITL_MS [role]
 *
 * One epoll loop on 127.0.0.1 (PORT 0: a free one; the port is printed). A completion streams its first token
 * TTFT_MS after the request arrived and one every ITL_MS after it, `max_tokens` of them, then a usage chunk and
 * [DONE]. With `role`, chat streams begin at once with a delta that has only a role.
 *
 *   GET  /health, GET /v1/models, POST /v1/completions, POST /v1/chat/completions
 *   GET  /__stats   what really happened, for the judge: CPU seconds, requests, connections, the most requests in
 *                   flight, lateness of tokens, and for each request when it arrived and its first and last token
 *                   left (seconds on CLOCK_MONOTONIC)
 *   GET  /__reset   forget it
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FDS = 65536, MAX_EVENTS = 512, MAX_RECORDS = 1 << 20, MAX_LATENESSES = 1 << 24, TOKENS_A_TURN = 256 };

typedef struct {
    double arrived, first_token, last_token;
} Record;

typedef struct {
    int streaming;      /* a completion is under way */
    int chat;           /* ... of the chat API */
    int tokens, sent;   /* how many it has, how many are out */
    long generation;    /* counts uses of this descriptor, so that timers of an old one are known */
    double arrived, first_token;
    char *in;           /* bytes read and not yet handled */
    int in_length, in_capacity;
} Connection;

typedef struct {
    double due;
    int fd;
    long generation;
} Timer;

static Connection connections[MAX_FDS];
static Timer heap[MAX_FDS * 2];
static int heap_length;
static Record *records;
static float *latenesses;
static long record_count, lateness_count, connection_count, in_flight, max_in_flight;
static double ttft_s, itl_s;
static int role_first, poller;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* ---- timers: a binary heap by time ---- */

static void timer_push(Timer timer) {
    int at = heap_length++;
    while (at > 0 && heap[(at - 1) / 2].due > timer.due) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = timer;
}

static Timer timer_pop(void) {
    Timer top = heap[0], last = heap[--heap_length];
    int at = 0;
    for (;;) {
        int child = 2 * at + 1;
        if (child >= heap_length) break;
        if (child + 1 < heap_length && heap[child + 1].due < heap[child].due) child++;
        if (heap[child].due >= last.due) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return top;
}

/* ---- sending ---- */

static void send_all(int fd, const char *data, size_t length) {
    while (length > 0) {
        ssize_t n = send(fd, data, length, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno != EAGAIN) return;
            usleep(100); /* the client reads too slowly for its socket buffer: rare, and its own fault */
            continue;
        }
        data += n;
        length -= (size_t)n;
    }
}

static void send_plain(int fd, const char *type, const char *body, size_t length) {
    char head[200];
    int n = snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %zu\r\n\r\n", type, length);
    send_all(fd, head, (size_t)n);
    send_all(fd, body, length);
}

static int put_chunk(char *out, const char *data, int length) {
    int n = sprintf(out, "%x\r\n", (unsigned)length);
    memcpy(out + n, data, (size_t)length);
    memcpy(out + n + length, "\r\n", 2);
    return n + length + 2;
}

static void send_token(int fd, Connection *c) {
    char event[512], out[2048];
    int last = c->sent == c->tokens - 1;
    const char *finish = last ? "\"length\"" : "null";
    int n = c->chat
        ? sprintf(event, "data: {\"id\":\"x\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"mock-model\","
                         "\"choices\":[{\"index\":0,\"finish_reason\":%s,\"delta\":{\"content\":\"tok \"}}]}\n\n", finish)
        : sprintf(event, "data: {\"id\":\"x\",\"object\":\"text_completion\",\"created\":1,\"model\":\"mock-model\","
                         "\"choices\":[{\"index\":0,\"finish_reason\":%s,\"text\":\"tok \"}]}\n\n", finish);
    int length = put_chunk(out, event, n);
    if (last) {
        n = sprintf(event, "data: {\"id\":\"x\",\"object\":\"%s\",\"created\":1,\"model\":\"mock-model\",\"choices\":[],"
                           "\"usage\":{\"prompt_tokens\":600,\"completion_tokens\":%d,\"total_tokens\":%d}}\n\n"
                           "data: [DONE]\n\n",
                    c->chat ? "chat.completion.chunk" : "text_completion", c->tokens, 600 + c->tokens);
        length += put_chunk(out + length, event, n);
        length += sprintf(out + length, "0\r\n\r\n");
    }
    if (c->sent == 0) c->first_token = now_s();
    send_all(fd, out, (size_t)length);
}

/* ---- requests ---- */

static int number_behind(const char *body, const char *key) {
    const char *at = strstr(body, key);
    at = at ? strchr(at, ':') : NULL;
    return at ? atoi(at + 1) : 0;
}

static void begin_stream(int fd, Connection *c, const char *body) {
    int tokens = number_behind(body, "\"max_tokens\"");
    if (tokens <= 0) tokens = number_behind(body, "\"max_completion_tokens\"");
    c->streaming = 1;
    c->chat = strstr(body, "\"messages\"") != NULL;
    c->tokens = tokens > 0 ? tokens : 16;
    c->sent = 0;
    c->arrived = now_s();
    if (++in_flight > max_in_flight) max_in_flight = in_flight;
    const char *head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    send_all(fd, head, strlen(head));
    if (role_first && c->chat) {
        char out[512];
        const char *role = "data: {\"id\":\"x\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"mock-model\","
                           "\"choices\":[{\"index\":0,\"finish_reason\":null,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
        send_all(fd, out, (size_t)put_chunk(out, role, (int)strlen(role)));
    }
    timer_push((Timer){c->arrived + ttft_s, fd, c->generation});
}

static int by_value(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void send_stats(int fd) {
    char *out = malloc(400 + (size_t)record_count * 80);
    float *sorted = malloc(sizeof(float) * (size_t)(lateness_count + 1));
    memcpy(sorted, latenesses, sizeof(float) * (size_t)lateness_count);
    qsort(sorted, (size_t)lateness_count, sizeof(float), by_value);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double cpu_s = usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
    double p99 = lateness_count ? sorted[(long)((double)lateness_count * 0.99)] * 1e3 : 0;
    double worst = lateness_count ? sorted[lateness_count - 1] * 1e3 : 0;
    int n = sprintf(out, "{\"cpu_s\":%.4f,\"connections\":%ld,\"max_in_flight\":%ld,\"tokens\":%ld,\"late_p99_ms\":%.3f,"
                         "\"late_max_ms\":%.3f,\"records\":[", cpu_s, connection_count, max_in_flight, lateness_count, p99, worst);
    for (long i = 0; i < record_count; i++)
        n += sprintf(out + n, "%s[%.6f,%.6f,%.6f]", i ? "," : "", records[i].arrived, records[i].first_token, records[i].last_token);
    n += sprintf(out + n, "]}");
    send_plain(fd, "application/json", out, (size_t)n);
    free(out);
    free(sorted);
}

static void answer(int fd, Connection *c, const char *head, const char *body) {
    if (!strncmp(head, "POST /v1/", 9)) {
        begin_stream(fd, c, body);
    } else if (!strncmp(head, "GET /health", 11)) {
        send_plain(fd, "text/plain", "ok", 2);
    } else if (!strncmp(head, "GET /v1/models", 14)) {
        const char *models = "{\"object\":\"list\",\"data\":[{\"id\":\"mock-model\",\"object\":\"model\",\"max_model_len\":32768}]}";
        send_plain(fd, "application/json", models, strlen(models));
    } else if (!strncmp(head, "GET /__reset", 12)) {
        record_count = lateness_count = connection_count = max_in_flight = 0;
        send_plain(fd, "text/plain", "ok", 2);
    } else if (!strncmp(head, "GET /__stats", 12)) {
        send_stats(fd);
    } else {
        const char *absent = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
        send_all(fd, absent, strlen(absent));
    }
}

/* Handle whole requests among the bytes read; one completion at a time, as HTTP/1.1 without pipelining has it. */
static void handle_input(int fd) {
    Connection *c = &connections[fd];
    while (!c->streaming) {
        c->in[c->in_length] = 0;
        char *end = memmem(c->in, (size_t)c->in_length, "\r\n\r\n", 4);
        if (!end) return;
        int head_length = (int)(end - c->in) + 4, body_length = 0;
        *end = 0;
        char *length = strcasestr(c->in, "content-length:");
        int chunked = strcasestr(c->in, "transfer-encoding: chunked") != NULL;
        int expects = strcasestr(c->in, "expect: 100") != NULL;
        if (length) body_length = atoi(length + 15);
        *end = '\r';
        if (expects && c->in_length == head_length) send_all(fd, "HTTP/1.1 100 Continue\r\n\r\n", 25);
        if (chunked) {
            /* Good enough for finding the end and `max_tokens`: clients send such bodies in one piece. */
            char *last = memmem(c->in + head_length, (size_t)(c->in_length - head_length), "0\r\n\r\n", 5);
            if (!last) return;
            body_length = (int)(last + 5 - c->in) - head_length;
        }
        int used = head_length + body_length;
        if (c->in_length < used) return;
        char kept = c->in[used];
        c->in[used] = 0;
        answer(fd, c, c->in, c->in + head_length);
        c->in[used] = kept;
        memmove(c->in, c->in + used, (size_t)(c->in_length - used));
        c->in_length -= used;
    }
}

static void close_connection(int fd) {
    Connection *c = &connections[fd];
    if (c->streaming) in_flight--;
    c->streaming = 0;
    c->generation++;
    c->in_length = 0;
    close(fd);
}

static void read_from(int fd) {
    Connection *c = &connections[fd];
    if (c->in_capacity - c->in_length < 16384) {
        c->in_capacity = c->in_capacity ? c->in_capacity * 2 : 1 << 16;
        c->in = realloc(c->in, (size_t)c->in_capacity + 1);
    }
    ssize_t n = recv(fd, c->in + c->in_length, (size_t)(c->in_capacity - c->in_length), 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
        close_connection(fd);
        return;
    }
    c->in_length += (int)n;
    handle_input(fd);
}

static void accept_all(int listener) {
    int one = 1, fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        if (fd >= MAX_FDS) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
        connection_count++;
    }
}

static void send_due_tokens(void) {
    double now = now_s();
    /* A bounded number a turn, so that arrivals are stamped in time. */
    for (int budget = TOKENS_A_TURN; budget && heap_length && heap[0].due <= now; budget--) {
        Timer timer = timer_pop();
        Connection *c = &connections[timer.fd];
        if (c->generation != timer.generation || !c->streaming) continue;
        if (lateness_count < MAX_LATENESSES) latenesses[lateness_count++] = (float)(now_s() - timer.due);
        send_token(timer.fd, c);
        if (++c->sent < c->tokens) {
            timer_push((Timer){c->arrived + ttft_s + c->sent * itl_s, timer.fd, c->generation});
            continue;
        }
        c->streaming = 0;
        in_flight--;
        if (record_count < MAX_RECORDS) records[record_count++] = (Record){c->arrived, c->first_token, now_s()};
        handle_input(timer.fd);
    }
}

int main(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: known_server PORT TTFT_MS ITL_MS [role]\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_TIMERSLACK, 1000UL);
    ttft_s = atof(argv[2]) / 1e3;
    itl_s = atof(argv[3]) / 1e3;
    role_first = argc > 4;
    records = malloc(sizeof(Record) * MAX_RECORDS);
    latenesses = malloc(sizeof(float) * MAX_LATENESSES);

    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(argv[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 4096)
        || getsockname(listener, (struct sockaddr *)&address, &size)) {
        perror("known_server");
        return 1;
    }
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);

    poller = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, ready[MAX_EVENTS];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        struct timespec wait, *timeout = NULL;
        if (heap_length) {
            double left = heap[0].due - now_s();
            if (left < 0) left = 0;
            wait.tv_sec = (time_t)left;
            wait.tv_nsec = (long)((left - (double)wait.tv_sec) * 1e9);
            timeout = &wait;
        }
        int n = epoll_pwait2(poller, ready, MAX_EVENTS, timeout, NULL);
        for (int i = 0; i < n; i++) {
            if (ready[i].data.fd == listener) accept_all(listener);
            else read_from(ready[i].data.fd);
        }
        send_due_tokens();
    }
}
