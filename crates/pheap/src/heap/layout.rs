//! The heap's on-media format, version 1.
//!
//! ```text
//!  page 0     1 …            …                                    …              …
//!  ┌────────┬──────────────┬────────────────────────────────────┬──────────────┬─────────────────┐
//!  │ header │ page map     │ data pages                         │ page map     │ data pages …    │
//!  └────────┴──────────────┴────────────────────────────────────┴──────────────┴─────────────────┘
//!           └──────────────────── zone 0 ───────────────────────┴────────── zone 1: grown ───────┘
//!
//!  page map: one byte a data page      free │ run: head rest rest … │ slab: class (rest rest rest)
//!
//!  slab     ┌────────────────────┬─────────┬─────────┬───
//!           │ header: 64 bytes,  │ block 0 │ block 1 │ …        all blocks of one size
//!           │ one bit a block    │         │         │
//!           └────────────────────┴─────────┴─────────┴───
//! ```
//!
//! All numbers are little-endian, and all references are offsets from the start of the heap: a heap
//! may be copied to another address. Only the first `maps_ready` pages of a zone's map are valid;
//! pages beyond them are free, whatever the bytes are. So formatting writes only the header,
//! however long the object is.
//!
//! A page map has room for as many additional pages as the heap has, so that a heap that grows in
//! small steps has few zones: a new one each time it has doubled. A run never spans two zones.

use xxhash_rust::xxh3::xxh3_64;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::error::{Damage, HeapError, RootTag};

/// Size of a page: the unit that `psync` writes.
pub const PAGE_BYTES: u64 = 4096;
/// The version of the format. It is frozen: heaps of this version stay readable. (Version 0 was
/// experimental.)
pub const HEAP_FORMAT_VERSION: u32 = 1;

/// The most zones a header has room for.
pub(crate) const MAX_ZONES: usize = 64;
const MAGIC: [u8; 8] = *b"AQFRHEAP";
const FLAG_RELOCATABLE: u32 = 1;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawZone {
    map_first_page: U64,
    map_pages: U64,
    maps_ready: U64,
    data_pages: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 8],
    version: U32,
    flags: U32,
    address: U64,
    len_bytes: U64,
    root_offset: U64,
    root_size: U64,
    root_align: U64,
    root_type_id: U64,
    root_shape: U64,
    zone_count: U64,
    zones: [RawZone; MAX_ZONES],
    reserved: [u8; 1960],
    checksum: U64,
}

const _: () = {
    assert!(size_of::<RawHeader>() == PAGE_BYTES as usize);
    assert!(std::mem::offset_of!(RawHeader, version) == 8);
    assert!(std::mem::offset_of!(RawHeader, address) == 16);
    assert!(std::mem::offset_of!(RawHeader, root_offset) == 32);
    assert!(std::mem::offset_of!(RawHeader, zone_count) == 72);
    assert!(std::mem::offset_of!(RawHeader, zones) == 80);
    assert!(std::mem::offset_of!(RawHeader, checksum) == 4088);
};

/// The first page of a heap, decoded and validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    /// The address the heap must be at; `None` if it may be at any.
    pub address: Option<u64>,
    /// A multiple of the page size.
    pub len_bytes: u64,
    pub root: Option<Root>,
    /// In page order, without gaps.
    pub zones: Vec<Zone>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Root {
    pub offset: u64,
    pub tag: RootTag,
}

/// A page map and the pages it describes, which follow it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Zone {
    pub map_first_page: u64,
    pub map_pages: u64,
    /// How many pages of the map are valid.
    pub maps_ready: u64,
    pub data_pages: u64,
}

impl Zone {
    /// A zone in `pages` pages from `first_page`, all of it free. `None` if they are too few.
    pub fn fresh(first_page: u64, pages: u64) -> Option<Zone> {
        // The heap's pages without its header, plus the zone's.
        let room_pages = pages.checked_mul(2)?.checked_add(first_page - 1)?;
        // If the addition is small compared with the heap, the map must still leave room for data
        // pages.
        let map_pages = room_pages.div_ceil(PAGE_BYTES).min(pages / 2).max(1);
        let data_pages = pages.checked_sub(map_pages).filter(|&left| left > 0)?;
        Some(Zone { map_first_page: first_page, map_pages, maps_ready: 0, data_pages })
    }

    pub fn data_first_page(&self) -> u64 {
        self.map_first_page + self.map_pages
    }

    /// The first page after the zone.
    pub fn end_page(&self) -> u64 {
        self.data_first_page() + self.data_pages
    }

    /// The first data page that the ready maps do not describe.
    pub fn ready_end_page(&self) -> u64 {
        self.data_first_page() + self.data_pages.min(self.maps_ready * PAGE_BYTES)
    }

    /// How many data pages the map has room for.
    pub fn capacity_pages(&self) -> u64 {
        self.map_pages * PAGE_BYTES
    }

    /// The offset of the map's byte for a data page of this zone.
    pub fn map_offset(&self, page: u64) -> u64 {
        self.map_first_page * PAGE_BYTES + (page - self.data_first_page())
    }
}

impl Header {
    /// Encodes the header as a page.
    pub fn encode(&self) -> [u8; PAGE_BYTES as usize] {
        let mut zones = [RawZone::new_zeroed(); MAX_ZONES];
        for (raw, zone) in zones.iter_mut().zip(&self.zones) {
            *raw = RawZone {
                map_first_page: U64::new(zone.map_first_page),
                map_pages: U64::new(zone.map_pages),
                maps_ready: U64::new(zone.maps_ready),
                data_pages: U64::new(zone.data_pages),
            };
        }
        let tag = self.root.map(|root| root.tag);
        let field = |value: fn(RootTag) -> u64| U64::new(tag.map_or(0, value));
        let mut raw = RawHeader {
            magic: MAGIC,
            version: U32::new(HEAP_FORMAT_VERSION),
            flags: U32::new(if self.address.is_none() { FLAG_RELOCATABLE } else { 0 }),
            address: U64::new(self.address.unwrap_or(0)),
            len_bytes: U64::new(self.len_bytes),
            root_offset: U64::new(self.root.map_or(0, |root| root.offset)),
            root_size: field(|tag| tag.size_bytes),
            root_align: field(|tag| tag.align_bytes),
            root_type_id: field(|tag| tag.type_id),
            root_shape: field(|tag| tag.shape),
            zone_count: U64::new(self.zones.len() as u64),
            zones,
            reserved: [0; 1960],
            checksum: U64::ZERO,
        };
        raw.checksum = U64::new(raw.computed_checksum());
        zerocopy::transmute!(raw)
    }

    /// Reads and validates the header of the heap at `address` from its page.
    ///
    /// Magic and version are checked first, to distinguish zeroed memory, foreign content and other
    /// versions from damage.
    pub fn decode(page: &[u8; PAGE_BYTES as usize], address: u64) -> Result<Header, HeapError> {
        if page.iter().all(|&byte| byte == 0) {
            return Err(HeapError::NotFormatted { address });
        }
        let raw: &RawHeader = zerocopy::transmute_ref!(page);
        if raw.magic != MAGIC {
            return Err(HeapError::NotAHeap { address });
        }
        if raw.version.get() != HEAP_FORMAT_VERSION {
            return Err(HeapError::Version {
                found: raw.version.get(),
                known: HEAP_FORMAT_VERSION,
            });
        }
        if raw.checksum.get() != raw.computed_checksum() {
            return Err(HeapError::Damaged { offset_bytes: 0, damage: Damage::HeaderChecksum });
        }
        // The checksum matches, so a heap wrote these bytes. Still check that no field points out
        // of the memory.
        raw.decode_fields().map_err(|field| HeapError::Damaged {
            offset_bytes: 0,
            damage: Damage::HeaderField(field),
        })
    }
}

impl RawHeader {
    fn computed_checksum(&self) -> u64 {
        let bytes = self.as_bytes();
        xxh3_64(&bytes[..bytes.len() - size_of::<U64>()])
    }

    fn decode_fields(&self) -> Result<Header, &'static str> {
        if self.flags.get() & !FLAG_RELOCATABLE != 0 {
            return Err("flags");
        }
        let relocatable = self.flags.get() & FLAG_RELOCATABLE != 0;
        let len_bytes = self.len_bytes.get();
        if !len_bytes.is_multiple_of(PAGE_BYTES) || len_bytes > isize::MAX as u64 {
            return Err("length");
        }
        Ok(Header {
            address: (!relocatable).then_some(self.address.get()),
            len_bytes,
            root: self.decode_root()?,
            zones: self.decode_zones(len_bytes / PAGE_BYTES)?,
        })
    }

    fn decode_root(&self) -> Result<Option<Root>, &'static str> {
        let (offset, size) = (self.root_offset.get(), self.root_size.get());
        if offset == 0 {
            return Ok(None);
        }
        if offset.checked_add(size).is_none_or(|end| end > self.len_bytes.get()) {
            return Err("root");
        }
        let tag = RootTag {
            size_bytes: size,
            align_bytes: self.root_align.get(),
            type_id: self.root_type_id.get(),
            shape: self.root_shape.get(),
        };
        Ok(Some(Root { offset, tag }))
    }

    fn decode_zones(&self, pages: u64) -> Result<Vec<Zone>, &'static str> {
        let count = usize::try_from(self.zone_count.get()).map_err(|_| "zone count")?;
        let raw = self.zones.get(..count).ok_or("zone count")?;
        let mut next_page = 1;
        let mut zones = Vec::with_capacity(count);
        for raw in raw {
            let zone = Zone {
                map_first_page: raw.map_first_page.get(),
                map_pages: raw.map_pages.get(),
                maps_ready: raw.maps_ready.get(),
                data_pages: raw.data_pages.get(),
            };
            let starts_in_order = zone.map_first_page == next_page && zone.map_pages > 0;
            let end_page = next_page
                .checked_add(zone.map_pages)
                .and_then(|page| page.checked_add(zone.data_pages))
                .filter(|&end| end <= pages);
            let (true, Some(end_page)) = (starts_in_order, end_page) else {
                return Err("zones");
            };
            // No overflow: there are fewer pages than bytes in the address space.
            if zone.data_pages == 0
                || zone.data_pages > zone.capacity_pages()
                || zone.maps_ready > zone.map_pages
            {
                return Err("zones");
            }
            next_page = end_page;
            zones.push(zone);
        }
        if zones.is_empty() || next_page != pages {
            return Err("zones");
        }
        Ok(zones)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        let zone = Zone { maps_ready: 1, ..Zone::fresh(1, 1023).unwrap() };
        let tag = RootTag { size_bytes: 24, align_bytes: 8, type_id: 7, shape: 9 };
        Header {
            address: Some(0x2000_0000_0000),
            len_bytes: 1024 * PAGE_BYTES,
            root: Some(Root { offset: 8256, tag }),
            zones: vec![zone],
        }
    }

    /// Returns `page` with a correct checksum.
    fn sealed(mut page: [u8; 4096]) -> [u8; 4096] {
        let checksum = xxh3_64(&page[..4088]);
        page[4088..].copy_from_slice(&checksum.to_le_bytes());
        page
    }

    #[test]
    fn a_header_reads_back() {
        let decoded = Header::decode(&header().encode(), 0).unwrap();
        assert_eq!(decoded, header());
        let moving = Header { address: None, root: None, ..header() };
        assert_eq!(Header::decode(&moving.encode(), 0).unwrap(), moving);
    }

    #[test]
    fn what_is_not_a_header_says_why() {
        let decode = |page: [u8; 4096]| Header::decode(&page, 5).unwrap_err();
        assert_eq!(decode([0; 4096]), HeapError::NotFormatted { address: 5 });
        let mut page = header().encode();
        page[0] ^= 1;
        assert_eq!(decode(page), HeapError::NotAHeap { address: 5 });
        let mut page = header().encode();
        page[8] = 3;
        assert_eq!(decode(page), HeapError::Version { found: 3, known: 1 });
        let damaged = |damage| HeapError::Damaged { offset_bytes: 0, damage };
        for at in [12, 16, 40, 100, 3000, 4095] {
            let mut page = header().encode();
            page[at] ^= 0x10;
            assert_eq!(decode(page), damaged(Damage::HeaderChecksum), "{at}");
        }
    }

    /// A correct checksum does not make invalid fields acceptable.
    #[test]
    fn fields_that_lead_outside_are_refused() {
        let cases: [(usize, u64, &str); 12] = [
            (24, 4095, "length"),
            (24, u64::MAX - 4095, "length"),
            (32, 1024 * 4096, "root"),
            (40, u64::MAX, "root"),
            (72, 0, "zones"),
            (72, 65, "zone count"),
            (80, 2, "zones"),
            (80 + 8, u64::MAX, "zones"),
            (80 + 16, 3, "zones"),
            (80 + 24, 0, "zones"),
            (80 + 24, 100, "zones"),
            (80 + 24, 5000, "zones"),
        ];
        for (at, value, field) in cases {
            let mut page = header().encode();
            page[at..at + 8].copy_from_slice(&value.to_le_bytes());
            let damage = Damage::HeaderField(field);
            let expected = HeapError::Damaged { offset_bytes: 0, damage };
            assert_eq!(Header::decode(&sealed(page), 0).unwrap_err(), expected, "{at} {value}");
        }
    }

    /// More data pages than the map has bytes, although the pages exist.
    #[test]
    fn a_map_that_is_too_short_is_refused() {
        let zone = Zone { map_first_page: 1, map_pages: 1, maps_ready: 0, data_pages: 4097 };
        let len_bytes = (2 + 4097) * PAGE_BYTES;
        let header = Header { address: None, len_bytes, root: None, zones: vec![zone] };
        let damage = Damage::HeaderField("zones");
        let expected = HeapError::Damaged { offset_bytes: 0, damage };
        assert_eq!(Header::decode(&header.encode(), 0).unwrap_err(), expected);
    }

    #[test]
    fn a_fresh_zone_has_room_for_the_heap_to_double() {
        for first_page in [1, 4000, 100_000] {
            for pages in [2, 3, 100, 4096, 5000, 1 << 20] {
                let zone = Zone::fresh(first_page, pages).unwrap();
                assert_eq!(zone.end_page(), first_page + pages);
                let heap_may_double = zone.capacity_pages() >= first_page - 1 + 2 * zone.data_pages;
                assert!(heap_may_double || zone.map_pages == (pages / 2).max(1));
            }
        }
        assert_eq!(Zone::fresh(1, 1), None);
        assert_eq!(Zone::fresh(1, u64::MAX), None);
    }
}
