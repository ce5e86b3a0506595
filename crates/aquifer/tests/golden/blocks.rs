//! Images of pools as their non-zero blocks.

const BLOCK: usize = 512;

/// The non-zero blocks of an image, each behind its number.
pub fn to_blocks(image: &[u8]) -> Vec<u8> {
    let mut blocks = Vec::new();
    for (number, block) in (0_u32..).zip(image.chunks(BLOCK)) {
        if block.iter().any(|&byte| byte != 0) {
            blocks.extend(number.to_le_bytes());
            blocks.extend(block);
        }
    }
    blocks
}

/// The image of `len_bytes` that has these blocks.
pub fn from_blocks(blocks: &[u8], len_bytes: u64) -> Vec<u8> {
    let mut image = vec![0; len_bytes as usize];
    for block in blocks.chunks(4 + BLOCK) {
        let number = u32::from_le_bytes(block[..4].try_into().unwrap()) as usize;
        image[number * BLOCK..][..BLOCK].copy_from_slice(&block[4..]);
    }
    image
}
