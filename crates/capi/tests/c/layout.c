/* The layouts of version 0.1, for machines with 64 bits: programs that were compiled with it pass these. A
   struct that begins with its size may get fields at its end, and a larger size; nothing else may change. */
#include "test.h"

#include <assert.h>
#include <stddef.h>

#define SIZE(type, size) static_assert(sizeof(type) >= (size), "a struct has shrunk")
#define AT(type, field, offset) static_assert(offsetof(type, field) == (offset), "a field has moved")
#define FIXED(type, size) static_assert(sizeof(type) == (size), "a struct that cannot grow has")

SIZE(aq_cache_options, 56);
AT(aq_cache_options, size, 0);
AT(aq_cache_options, budget_bytes, 8);
AT(aq_cache_options, page_bytes, 16);
AT(aq_cache_options, policy, 24);
AT(aq_cache_options, io_threads, 32);
AT(aq_cache_options, publish, 40);
AT(aq_cache_options, serving_thread, 48);

SIZE(aq_cache_stats, 144);
AT(aq_cache_stats, size, 0);
AT(aq_cache_stats, budget_bytes, 8);
AT(aq_cache_stats, page_bytes, 16);
AT(aq_cache_stats, resident_pages, 24);
AT(aq_cache_stats, dirty_pages, 32);
AT(aq_cache_stats, kernel_resident_pages, 40);
AT(aq_cache_stats, misses, 48);
AT(aq_cache_stats, prefetched, 56);
AT(aq_cache_stats, write_faults, 64);
AT(aq_cache_stats, load_errors, 72);
AT(aq_cache_stats, evictions, 80);
AT(aq_cache_stats, written_pages, 88);
AT(aq_cache_stats, write_errors, 96);
AT(aq_cache_stats, syncs, 104);
AT(aq_cache_stats, stalls, 112);
AT(aq_cache_stats, signals, 120);
AT(aq_cache_stats, fault_p50_ns, 128);
AT(aq_cache_stats, fault_p99_ns, 136);

SIZE(aq_error, 40);
AT(aq_error, size, 0);
AT(aq_error, number, 8);
AT(aq_error, kind, 12);
AT(aq_error, offset, 16);
AT(aq_error, path, 24);
AT(aq_error, text, 32);

FIXED(aq_range, 16);
AT(aq_range, offset, 0);
AT(aq_range, length, 8);

SIZE(aq_file_status, 96);
AT(aq_file_status, size, 0);
AT(aq_file_status, inode, 8);
AT(aq_file_status, len_bytes, 16);
AT(aq_file_status, allocated_bytes, 24);
AT(aq_file_status, links, 32);
AT(aq_file_status, mode, 40);
AT(aq_file_status, uid, 44);
AT(aq_file_status, gid, 48);
AT(aq_file_status, immutable, 52);
AT(aq_file_status, accessed_ns, 56);
AT(aq_file_status, modified_ns, 64);
AT(aq_file_status, changed_ns, 72);
AT(aq_file_status, generation, 80);
AT(aq_file_status, device, 88);

SIZE(aq_mapper_options, 32);
AT(aq_mapper_options, size, 0);
AT(aq_mapper_options, mapping_cache_bytes, 8);
AT(aq_mapper_options, resident_budget_bytes, 16);
AT(aq_mapper_options, write_back_bytes_per_second, 24);

SIZE(aq_mapper_stats, 48);
AT(aq_mapper_stats, size, 0);
AT(aq_mapper_stats, hits, 8);
AT(aq_mapper_stats, misses, 16);
AT(aq_mapper_stats, parked, 24);
AT(aq_mapper_stats, parked_bytes, 32);
AT(aq_mapper_stats, resident_bytes, 40);

SIZE(aq_map_options, 16);
AT(aq_map_options, size, 0);
AT(aq_map_options, writable, 8);
AT(aq_map_options, backend, 12);

FIXED(aq_read, 24);
AT(aq_read, offset, 0);
AT(aq_read, size, 8);
AT(aq_read, target, 16);

SIZE(aq_object_options, 40);
AT(aq_object_options, size, 0);
AT(aq_object_options, heap, 8);
AT(aq_object_options, relocatable, 12);
AT(aq_object_options, address, 16);
AT(aq_object_options, read_key, 24);
AT(aq_object_options, write_key, 32);

SIZE(aq_object_info, 48);
AT(aq_object_info, size, 0);
AT(aq_object_info, size_bytes, 8);
AT(aq_object_info, address, 16);
AT(aq_object_info, created_ns, 24);
AT(aq_object_info, changed_ns, 32);
AT(aq_object_info, state, 40);
AT(aq_object_info, flags, 44);

SIZE(aq_heap_stats, 40);
AT(aq_heap_stats, size, 0);
AT(aq_heap_stats, allocations, 8);
AT(aq_heap_stats, allocated_bytes, 16);
AT(aq_heap_stats, free_bytes, 24);
AT(aq_heap_stats, largest_run_bytes, 32);

FIXED(aq_page, 24);
AT(aq_page, data, 0);
AT(aq_page, page, 8);
AT(aq_page, pages, 16);

FIXED(aq_page_mut, 24);
AT(aq_page_mut, data, 0);
AT(aq_page_mut, page, 8);
AT(aq_page_mut, pages, 16);

SIZE(aq_pool_options, 72);
AT(aq_pool_options, size, 0);
AT(aq_pool_options, read_only, 8);
AT(aq_pool_options, exclusive, 12);
AT(aq_pool_options, overwrite, 16);
AT(aq_pool_options, mode, 20);
AT(aq_pool_options, log_bytes, 24);
AT(aq_pool_options, inodes, 32);
AT(aq_pool_options, segment_directory, 40);
AT(aq_pool_options, stall_timeout_ns, 48);
AT(aq_pool_options, segment_mode, 56);
AT(aq_pool_options, guard, 60);
AT(aq_pool_options, broker_socket, 64);

SIZE(aq_pool_info, 72);
AT(aq_pool_info, size, 0);
AT(aq_pool_info, free_pages, 8);
AT(aq_pool_info, largest_free_pages, 16);
AT(aq_pool_info, free_slots, 24);
AT(aq_pool_info, objects, 32);
AT(aq_pool_info, files, 40);
AT(aq_pool_info, directories, 48);
AT(aq_pool_info, processes, 56);
AT(aq_pool_info, recovered_records, 64);

FIXED(aq_completion, 32);
AT(aq_completion, token, 0);
AT(aq_completion, result, 8);
AT(aq_completion, kind, 12);
AT(aq_completion, offset, 16);
AT(aq_completion, reserved, 24);

SIZE(aq_rows_options, 32);
AT(aq_rows_options, size, 0);
AT(aq_rows_options, row_bytes, 8);
AT(aq_rows_options, header_bytes, 16);
AT(aq_rows_options, budget_bytes, 24);

SIZE(aq_rows_stats, 64);
AT(aq_rows_stats, size, 0);
AT(aq_rows_stats, hits, 8);
AT(aq_rows_stats, misses, 16);
AT(aq_rows_stats, evictions, 24);
AT(aq_rows_stats, reads, 32);
AT(aq_rows_stats, read_bytes, 40);
AT(aq_rows_stats, resident_rows, 48);
AT(aq_rows_stats, capacity_rows, 56);

SIZE(aq_attach_options, 32);
AT(aq_attach_options, size, 0);
AT(aq_attach_options, writable, 8);
AT(aq_attach_options, key, 16);
AT(aq_attach_options, shadow_budget_bytes, 24);

SIZE(aq_object_stats, 32);
AT(aq_object_stats, size, 0);
AT(aq_object_stats, psyncs, 8);
AT(aq_object_stats, pages, 16);
AT(aq_object_stats, bytes, 24);

SIZE(aq_pool_space, 48);
AT(aq_pool_space, size, 0);
AT(aq_pool_space, total_bytes, 8);
AT(aq_pool_space, free_bytes, 16);
AT(aq_pool_space, largest_free_bytes, 24);
AT(aq_pool_space, total_slots, 32);
AT(aq_pool_space, free_slots, 40);

SIZE(aq_device_functions, 80);
AT(aq_device_functions, size, 0);
AT(aq_device_functions, context, 8);
AT(aq_device_functions, read, 16);
AT(aq_device_functions, write, 24);
AT(aq_device_functions, sync, 32);
AT(aq_device_functions, len, 40);
AT(aq_device_functions, release, 48);
AT(aq_device_functions, alignment, 56);
AT(aq_device_functions, signal_safe, 64);
AT(aq_device_functions, name, 72);

FIXED(aq_write, 24);
AT(aq_write, offset, 0);
AT(aq_write, size, 8);
AT(aq_write, source, 16);

int main(void) {
    return 0;
}
