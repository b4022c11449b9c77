/* A library with NVML's symbols and no hardware, for nvidia-ml-py to load in place of the driver's.
 *
 * What it answers is written in the file that CHUNKTUNE_FAKE_NVML names, one fact a line:
 *
 *   driver VERSION
 *   device UUID TOTAL_BYTES NAME...
 *   used UUID BYTES [BYTES...]      one value a call; the last one stays
 *   reserved UUID BYTES             what the driver keeps; the first version of the call counts it as used
 *   busy UUID PERCENT [PERCENT...]  one value a call; the last one stays
 *   process UUID PID [BYTES]        without BYTES: not available, as in a container
 *   error FUNCTION CODE [FROM [TO]] its calls FROM to TO (counted from 1) return CODE
 *   hang FUNCTION MILLISECONDS      each call takes this long
 *
 * Compile with -DWITHOUT_UTILIZATION for a driver that lacks a function. Layouts are those of nvml.h.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MOST 16
#define MOST_VALUES 256

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, UNKNOWN = 999 };

struct series { long long values[MOST_VALUES]; int count, next; };
struct process { unsigned pid; unsigned long long bytes; };
struct device {
    char uuid[96], name[96];
    unsigned long long total, reserved;
    struct series used, busy;
    struct process processes[MOST];
    unsigned process_count;
};
struct fault { char function[96]; int code, from, to, hang_ms, calls; };

static struct device devices[MOST];
static int device_count, started;
static struct fault faults[MOST];
static int fault_count;
static char driver[96];

static struct device *by_uuid(const char *uuid) {
    for (int i = 0; i < device_count; i++)
        if (strcmp(devices[i].uuid, uuid) == 0) return &devices[i];
    return NULL;
}

static void read_series(struct series *series, char *rest) {
    for (char *word = strtok(rest, " \n"); word && series->count < MOST_VALUES; word = strtok(NULL, " \n"))
        series->values[series->count++] = atoll(word);
}

static long long next_value(struct series *series) {
    if (series->count == 0) return 0;
    int at = series->next < series->count ? series->next++ : series->count - 1;
    return series->values[at];
}

static void read_line(char *line) {
    char kind[32] = "", subject[96] = "";
    int used = 0;
    if (sscanf(line, "%31s %95s %n", kind, subject, &used) < 2 || kind[0] == '#') return;
    char *rest = line + used;
    struct device *device = by_uuid(subject);
    if (strcmp(kind, "driver") == 0) {
        snprintf(driver, sizeof driver, "%s", subject);
    } else if (strcmp(kind, "device") == 0 && device_count < MOST) {
        device = &devices[device_count++];
        snprintf(device->uuid, sizeof device->uuid, "%s", subject);
        sscanf(rest, "%llu %95[^\n]", &device->total, device->name);
    } else if (strcmp(kind, "used") == 0 && device) {
        read_series(&device->used, rest);
    } else if (strcmp(kind, "reserved") == 0 && device) {
        device->reserved = strtoull(rest, NULL, 10);
    } else if (strcmp(kind, "busy") == 0 && device) {
        read_series(&device->busy, rest);
    } else if (strcmp(kind, "process") == 0 && device && device->process_count < MOST) {
        struct process *process = &device->processes[device->process_count++];
        process->bytes = ~0ull;
        sscanf(rest, "%u %llu", &process->pid, &process->bytes);
    } else if ((strcmp(kind, "error") == 0 || strcmp(kind, "hang") == 0) && fault_count < MOST) {
        struct fault *fault = &faults[fault_count++];
        snprintf(fault->function, sizeof fault->function, "%s", subject);
        fault->from = 1;
        fault->to = 1 << 30;
        if (kind[0] == 'h') sscanf(rest, "%d", &fault->hang_ms);
        else sscanf(rest, "%d %d %d", &fault->code, &fault->from, &fault->to);
    }
}

static void read_script(void) {
    memset(devices, 0, sizeof devices);
    memset(faults, 0, sizeof faults);
    device_count = fault_count = 0;
    strcpy(driver, "570.00");
    const char *path = getenv("CHUNKTUNE_FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return;
    char line[4096];
    while (fgets(line, sizeof line, file)) read_line(line);
    fclose(file);
}

static int faulty(const char *function) {
    int code = started || strncmp(function, "nvmlInit", 8) == 0 ? OK : UNINITIALIZED;
    for (int i = 0; i < fault_count; i++) {
        struct fault *fault = &faults[i];
        if (strcmp(fault->function, function) != 0) continue;
        int call = ++fault->calls;
        if (fault->hang_ms) {
            struct timespec wait = {fault->hang_ms / 1000, (fault->hang_ms % 1000) * 1000000L};
            nanosleep(&wait, NULL);
        }
        if (fault->code && call >= fault->from && call <= fault->to) code = fault->code;
    }
    return code;
}

#define FAULTS do { int code_ = faulty(__func__); if (code_) return code_; } while (0)

int nvmlInit_v2(void) { if (!started) read_script(); FAULTS; started++; return OK; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; if (!started) read_script(); FAULTS; started++; return OK; }
int nvmlShutdown(void) { FAULTS; started--; return OK; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    FAULTS;
    snprintf(version, length, "%s", driver);
    return OK;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) { FAULTS; *version = 13000; return OK; }

int nvmlDeviceGetCount_v2(unsigned *count) { FAULTS; *count = (unsigned)device_count; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    FAULTS;
    if (index >= (unsigned)device_count) return INVALID_ARGUMENT;
    *handle = &devices[index];
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    FAULTS;
    *handle = by_uuid(uuid);
    return *handle ? OK : NOT_FOUND;
}

int nvmlDeviceGetUUID(struct device *device, char *uuid, unsigned length) {
    FAULTS;
    snprintf(uuid, length, "%s", device->uuid);
    return OK;
}

int nvmlDeviceGetName(struct device *device, char *name, unsigned length) {
    FAULTS;
    snprintf(name, length, "%s", device->name);
    return OK;
}

struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(struct device *device, struct memory *memory) {
    FAULTS;
    memory->total = device->total;
    memory->used = (unsigned long long)next_value(&device->used) + device->reserved;
    memory->free = memory->total - memory->used;
    return OK;
}

#ifndef WITHOUT_MEMORY_V2
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory_v2 *memory) {
    /* A fault of the call is meant whichever version of it is made. */
    int code = faulty("nvmlDeviceGetMemoryInfo");
    if (code) return code;
    memory->total = device->total;
    memory->reserved = device->reserved;
    memory->used = (unsigned long long)next_value(&device->used);
    memory->free = memory->total - memory->used - memory->reserved;
    return OK;
}
#endif

#ifndef WITHOUT_UTILIZATION
struct utilization { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(struct device *device, struct utilization *utilization) {
    FAULTS;
    utilization->gpu = (unsigned)next_value(&device->busy);
    utilization->memory = 0;
    return OK;
}
#endif

struct process_info { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, unsigned *count, struct process_info *infos) {
    FAULTS;
    unsigned room = *count;
    *count = device->process_count;
    if (room < device->process_count) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < device->process_count; i++) {
        infos[i].pid = device->processes[i].pid;
        infos[i].bytes = device->processes[i].bytes;
        infos[i].gpu_instance = infos[i].compute_instance = 0xFFFFFFFF;
    }
    return OK;
}
