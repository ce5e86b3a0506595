/* Searches a graph that is larger than memory, breadth first.

       graph FILE [NODES [BUDGET_MIB]]

   The file has a row of 16 neighbours for each node. A search takes the rows of all nodes of a level at
   once: the library sorts them, reads neighbours together and many at a time, and calls back for each row
   as it has been read. With plain loads each row would be a fault and a wait for the disk. */
#include <aquifer.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEGREE 16

/* One neighbour of a node: of a random graph that is computed, so that the result can be checked. */
static uint32_t neighbour(uint32_t node, uint32_t nodes, unsigned i) {
    uint64_t x = ((uint64_t)node << 8 | i) * 0x9E3779B97F4A7C15u;
    x ^= x >> 29;
    x *= 0xBF58476D1CE4E5B9u;
    return (uint32_t)((x >> 32) * nodes >> 32);
}

static int write_graph(const char *path, uint32_t nodes) {
    FILE *file = fopen(path, "wb");
    if (file == NULL) return -1;
    for (uint32_t node = 0; node < nodes; node++) {
        uint32_t row[DEGREE];
        for (unsigned i = 0; i < DEGREE; i++) row[i] = neighbour(node, nodes, i);
        if (fwrite(row, sizeof row, 1, file) != 1) break;
    }
    return fclose(file);
}

/* What a search knows: which nodes it has reached, and those of the next level. */
struct search {
    unsigned char *reached;
    uint32_t *next;
    size_t next_count;
};

static void reach(struct search *search, uint32_t node) {
    if (search->reached[node]) return;
    search->reached[node] = 1;
    search->next[search->next_count++] = node;
}

static int visit_row(void *context, size_t index, uint64_t offset, const void *data, size_t size) {
    struct search *search = (struct search *)context;
    (void)index, (void)offset;
    for (size_t at = 0; at < size; at += sizeof(uint32_t)) {
        uint32_t node;
        memcpy(&node, (const char *)data + at, sizeof node);
        reach(search, node);
    }
    return 0;
}

/* Searches from node 0; rows come from the mapping, or are computed if it is null. The number of nodes
   reached, or a negative error. */
static int64_t run(aq_mapping *mapping, uint32_t nodes, unsigned *levels) {
    struct search search = {(unsigned char *)calloc(nodes, 1), (uint32_t *)malloc(nodes * sizeof(uint32_t)), 0};
    uint32_t *level = (uint32_t *)malloc(nodes * sizeof(uint32_t));
    aq_range *rows = (aq_range *)malloc(nodes * sizeof(aq_range));
    int64_t result = -1;
    if (search.reached == NULL || search.next == NULL || level == NULL || rows == NULL) goto end;
    result = 0;
    reach(&search, 0);
    for (*levels = 0; search.next_count > 0; (*levels)++) {
        size_t count = search.next_count;
        memcpy(level, search.next, count * sizeof *level);
        search.next_count = 0;
        result += (int64_t)count;
        if (mapping != NULL) {
            for (size_t i = 0; i < count; i++) {
                rows[i].offset = (uint64_t)level[i] * DEGREE * sizeof(uint32_t);
                rows[i].length = DEGREE * sizeof(uint32_t);
            }
            int failed = aq_mapping_visit(mapping, rows, count, visit_row, &search);
            if (failed) {
                result = failed;
                goto end;
            }
        } else {
            for (size_t i = 0; i < count; i++)
                for (unsigned n = 0; n < DEGREE; n++) reach(&search, neighbour(level[i], nodes, n));
        }
    }
end:
    free(search.reached);
    free(search.next);
    free(level);
    free(rows);
    return result;
}

int main(int count, char **arguments) {
    if (count < 2) {
        fprintf(stderr, "usage: graph FILE [NODES [BUDGET_MIB]]\n");
        return 2;
    }
    const char *path = arguments[1];
    uint32_t nodes = count > 2 ? (uint32_t)strtoul(arguments[2], NULL, 10) : 4000000;
    aq_cache_options options = AQ_CACHE_OPTIONS_INIT;
    options.budget_bytes = (count > 3 ? strtoull(arguments[3], NULL, 10) : 32) << 20;
    if (write_graph(path, nodes) != 0) {
        perror(path);
        return 1;
    }

    int status = 1;
    aq_cache *cache = NULL;
    aq_mapping *graph = NULL;
    aq_cache_stats stats = AQ_CACHE_STATS_INIT;
    unsigned levels, expected_levels;
    int64_t reached;
    if (aq_cache_new(&options, &cache) != 0) goto failed;
    if (aq_map_path(cache, path, NULL, &graph) != 0) goto failed;
    if ((reached = run(graph, nodes, &levels)) < 0) goto failed;

    if (aq_cache_get_stats(cache, &stats) != 0) goto failed;
    printf("%" PRId64 " of %" PRIu32 " nodes reached in %u levels; graph %" PRIu64 " MiB, memory %" PRIu64 " MiB\n",
           reached, nodes, levels, aq_mapping_len(graph) >> 20, stats.budget_bytes >> 20);
    if (run(NULL, nodes, &expected_levels) != reached || expected_levels != levels) {
        fprintf(stderr, "the search of the computed graph has another result\n");
        goto end;
    }
    status = 0;
    goto end;
failed:
    fprintf(stderr, "graph: %s\n", aq_last_error());
end:
    aq_mapping_free(graph);
    aq_cache_free(cache);
    return status;
}
