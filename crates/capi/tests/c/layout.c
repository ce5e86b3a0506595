/* The layouts of version 0.1, for machines with 64 bits: programs that were compiled with it pass these. A
   struct that begins with its size may get fields at its end, and a larger size; nothing else may change, nor
   the types of fields: abidiff overlooks those (abi/suppressions.ini). Types of functions are written out. */
#include "test.h"

#include <assert.h>
#include <stddef.h>
#ifdef __cplusplus
#include <type_traits>
#define IS(type, field, ...) std::is_same<decltype(type::field), __VA_ARGS__>::value
#else
#define IS(type, field, ...) _Generic(((type *)0)->field, __VA_ARGS__ : 1, default : 0)
#endif

#define SIZE(type, size) static_assert(sizeof(type) >= (size), "a struct has shrunk")
#define AT(type, field, offset, ...)                                           \
    static_assert(offsetof(type, field) == (offset), "a field has moved"); \
    static_assert(IS(type, field, __VA_ARGS__), "a field has another type")
#define FIXED(type, size) static_assert(sizeof(type) == (size), "a struct that cannot grow has")

SIZE(aq_cache_options, 56);
AT(aq_cache_options, size, 0, size_t);
AT(aq_cache_options, budget_bytes, 8, uint64_t);
AT(aq_cache_options, page_bytes, 16, size_t);
AT(aq_cache_options, policy, 24, const char *);
AT(aq_cache_options, io_threads, 32, size_t);
AT(aq_cache_options, publish, 40, const char *);
AT(aq_cache_options, serving_thread, 48, uint64_t);

SIZE(aq_cache_stats, 144);
AT(aq_cache_stats, size, 0, size_t);
AT(aq_cache_stats, budget_bytes, 8, uint64_t);
AT(aq_cache_stats, page_bytes, 16, uint64_t);
AT(aq_cache_stats, resident_pages, 24, uint64_t);
AT(aq_cache_stats, dirty_pages, 32, uint64_t);
AT(aq_cache_stats, kernel_resident_pages, 40, uint64_t);
AT(aq_cache_stats, misses, 48, uint64_t);
AT(aq_cache_stats, prefetched, 56, uint64_t);
AT(aq_cache_stats, write_faults, 64, uint64_t);
AT(aq_cache_stats, load_errors, 72, uint64_t);
AT(aq_cache_stats, evictions, 80, uint64_t);
AT(aq_cache_stats, written_pages, 88, uint64_t);
AT(aq_cache_stats, write_errors, 96, uint64_t);
AT(aq_cache_stats, syncs, 104, uint64_t);
AT(aq_cache_stats, stalls, 112, uint64_t);
AT(aq_cache_stats, signals, 120, uint64_t);
AT(aq_cache_stats, fault_p50_ns, 128, uint64_t);
AT(aq_cache_stats, fault_p99_ns, 136, uint64_t);

SIZE(aq_error, 40);
AT(aq_error, size, 0, size_t);
AT(aq_error, number, 8, int);
AT(aq_error, kind, 12, int);
AT(aq_error, offset, 16, uint64_t);
AT(aq_error, path, 24, const char *);
AT(aq_error, text, 32, const char *);

FIXED(aq_range, 16);
AT(aq_range, offset, 0, uint64_t);
AT(aq_range, length, 8, uint64_t);

SIZE(aq_file_status, 96);
AT(aq_file_status, size, 0, size_t);
AT(aq_file_status, inode, 8, uint64_t);
AT(aq_file_status, len_bytes, 16, uint64_t);
AT(aq_file_status, allocated_bytes, 24, uint64_t);
AT(aq_file_status, links, 32, uint64_t);
AT(aq_file_status, mode, 40, uint32_t);
AT(aq_file_status, uid, 44, uint32_t);
AT(aq_file_status, gid, 48, uint32_t);
AT(aq_file_status, immutable, 52, uint32_t);
AT(aq_file_status, accessed_ns, 56, int64_t);
AT(aq_file_status, modified_ns, 64, int64_t);
AT(aq_file_status, changed_ns, 72, int64_t);
AT(aq_file_status, generation, 80, uint64_t);
AT(aq_file_status, device, 88, uint64_t);

SIZE(aq_mapper_options, 32);
AT(aq_mapper_options, size, 0, size_t);
AT(aq_mapper_options, mapping_cache_bytes, 8, uint64_t);
AT(aq_mapper_options, resident_budget_bytes, 16, uint64_t);
AT(aq_mapper_options, write_back_bytes_per_second, 24, uint64_t);

SIZE(aq_mapper_stats, 48);
AT(aq_mapper_stats, size, 0, size_t);
AT(aq_mapper_stats, hits, 8, uint64_t);
AT(aq_mapper_stats, misses, 16, uint64_t);
AT(aq_mapper_stats, parked, 24, uint64_t);
AT(aq_mapper_stats, parked_bytes, 32, uint64_t);
AT(aq_mapper_stats, resident_bytes, 40, uint64_t);

SIZE(aq_map_options, 16);
AT(aq_map_options, size, 0, size_t);
AT(aq_map_options, writable, 8, int);
AT(aq_map_options, backend, 12, int);

FIXED(aq_read, 24);
AT(aq_read, offset, 0, uint64_t);
AT(aq_read, size, 8, size_t);
AT(aq_read, target, 16, void *);

SIZE(aq_object_options, 56);
AT(aq_object_options, size, 0, size_t);
AT(aq_object_options, heap, 8, int);
AT(aq_object_options, relocatable, 12, int);
AT(aq_object_options, address, 16, uint64_t);
AT(aq_object_options, read_key, 24, const char *);
AT(aq_object_options, write_key, 32, const char *);
AT(aq_object_options, content, 40, const void *);
AT(aq_object_options, content_size, 48, size_t);

SIZE(aq_object_info, 48);
AT(aq_object_info, size, 0, size_t);
AT(aq_object_info, size_bytes, 8, uint64_t);
AT(aq_object_info, address, 16, uint64_t);
AT(aq_object_info, created_ns, 24, uint64_t);
AT(aq_object_info, changed_ns, 32, uint64_t);
AT(aq_object_info, state, 40, uint32_t);
AT(aq_object_info, flags, 44, uint32_t);

SIZE(aq_heap_stats, 40);
AT(aq_heap_stats, size, 0, size_t);
AT(aq_heap_stats, allocations, 8, uint64_t);
AT(aq_heap_stats, allocated_bytes, 16, uint64_t);
AT(aq_heap_stats, free_bytes, 24, uint64_t);
AT(aq_heap_stats, largest_run_bytes, 32, uint64_t);

FIXED(aq_page, 24);
AT(aq_page, data, 0, const void *);
AT(aq_page, page, 8, uint64_t);
AT(aq_page, pages, 16, aq_pages *);

FIXED(aq_page_mut, 24);
AT(aq_page_mut, data, 0, void *);
AT(aq_page_mut, page, 8, uint64_t);
AT(aq_page_mut, pages, 16, aq_pages *);

SIZE(aq_pool_options, 72);
AT(aq_pool_options, size, 0, size_t);
AT(aq_pool_options, read_only, 8, int);
AT(aq_pool_options, exclusive, 12, int);
AT(aq_pool_options, overwrite, 16, int);
AT(aq_pool_options, mode, 20, uint32_t);
AT(aq_pool_options, log_bytes, 24, uint64_t);
AT(aq_pool_options, inodes, 32, uint64_t);
AT(aq_pool_options, segment_directory, 40, const char *);
AT(aq_pool_options, stall_timeout_ns, 48, uint64_t);
AT(aq_pool_options, segment_mode, 56, uint32_t);
AT(aq_pool_options, guard, 60, int);
AT(aq_pool_options, broker_socket, 64, const char *);

SIZE(aq_pool_info, 72);
AT(aq_pool_info, size, 0, size_t);
AT(aq_pool_info, free_pages, 8, uint64_t);
AT(aq_pool_info, largest_free_pages, 16, uint64_t);
AT(aq_pool_info, free_slots, 24, uint64_t);
AT(aq_pool_info, objects, 32, uint64_t);
AT(aq_pool_info, files, 40, uint64_t);
AT(aq_pool_info, directories, 48, uint64_t);
AT(aq_pool_info, processes, 56, uint64_t);
AT(aq_pool_info, recovered_records, 64, uint64_t);

FIXED(aq_completion, 32);
AT(aq_completion, token, 0, uint64_t);
AT(aq_completion, result, 8, int);
AT(aq_completion, kind, 12, int);
AT(aq_completion, offset, 16, uint64_t);
AT(aq_completion, reserved, 24, uint64_t);

SIZE(aq_rows_options, 32);
AT(aq_rows_options, size, 0, size_t);
AT(aq_rows_options, row_bytes, 8, size_t);
AT(aq_rows_options, header_bytes, 16, uint64_t);
AT(aq_rows_options, budget_bytes, 24, uint64_t);

SIZE(aq_rows_stats, 64);
AT(aq_rows_stats, size, 0, size_t);
AT(aq_rows_stats, hits, 8, uint64_t);
AT(aq_rows_stats, misses, 16, uint64_t);
AT(aq_rows_stats, evictions, 24, uint64_t);
AT(aq_rows_stats, reads, 32, uint64_t);
AT(aq_rows_stats, read_bytes, 40, uint64_t);
AT(aq_rows_stats, resident_rows, 48, uint64_t);
AT(aq_rows_stats, capacity_rows, 56, uint64_t);

SIZE(aq_attach_options, 32);
AT(aq_attach_options, size, 0, size_t);
AT(aq_attach_options, writable, 8, uint64_t);
AT(aq_attach_options, key, 16, const char *);
AT(aq_attach_options, shadow_budget_bytes, 24, uint64_t);

SIZE(aq_object_stats, 32);
AT(aq_object_stats, size, 0, size_t);
AT(aq_object_stats, psyncs, 8, uint64_t);
AT(aq_object_stats, pages, 16, uint64_t);
AT(aq_object_stats, bytes, 24, uint64_t);

SIZE(aq_pool_space, 48);
AT(aq_pool_space, size, 0, size_t);
AT(aq_pool_space, total_bytes, 8, uint64_t);
AT(aq_pool_space, free_bytes, 16, uint64_t);
AT(aq_pool_space, largest_free_bytes, 24, uint64_t);
AT(aq_pool_space, total_slots, 32, uint64_t);
AT(aq_pool_space, free_slots, 40, uint64_t);

SIZE(aq_device_functions, 80);
AT(aq_device_functions, size, 0, size_t);
AT(aq_device_functions, context, 8, void *);
AT(aq_device_functions, read, 16, int64_t (*)(void *context, void *buffer, size_t size, uint64_t offset));
AT(aq_device_functions, write, 24, int (*)(void *context, const void *buffer, size_t size, uint64_t offset));
AT(aq_device_functions, sync, 32, int (*)(void *context));
AT(aq_device_functions, len, 40, int64_t (*)(void *context));
AT(aq_device_functions, release, 48, void (*)(void *context));
AT(aq_device_functions, alignment, 56, size_t);
AT(aq_device_functions, signal_safe, 64, uint64_t);
AT(aq_device_functions, name, 72, const char *);

FIXED(aq_write, 24);
AT(aq_write, offset, 0, uint64_t);
AT(aq_write, size, 8, size_t);
AT(aq_write, source, 16, const void *);

int main(void) {
    return 0;
}
