//! The CRC-32 of a few bytes, eight at a time: headers are too short for what a vector unit has to set up.

/// `TABLES[n][b]`: what byte `b` adds with `n` bytes behind it.
static TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut n = 1;
    while n < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before: u32 = tables[n - 1][byte];
            tables[n][byte] = (before >> 8) ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        n += 1;
    }
    tables
}

#[inline]
fn eight(crc: u32, word: u64) -> u32 {
    let word = word ^ u64::from(crc);
    let byte = |n: usize| TABLES[7 - n][(word >> (8 * n)) as usize & 0xff];
    byte(0) ^ byte(1) ^ byte(2) ^ byte(3) ^ byte(4) ^ byte(5) ^ byte(6) ^ byte(7)
}

/// The CRC that was `crc` so far, continued over `bytes`, of which those that `ones` has are taken for ones: the first eight at most.
#[inline]
pub(crate) fn update(crc: u32, bytes: &[u8], ones: u64) -> u32 {
    let mut state = !crc;
    let (words, rest) = bytes.as_chunks::<8>();
    let mut ones = ones;
    for word in words {
        state = eight(state, u64::from_le_bytes(*word) | ones);
        ones = 0;
    }
    for byte in rest {
        let byte = u32::from(*byte | ones as u8);
        ones >>= 8;
        state = (state >> 8) ^ TABLES[0][((state ^ byte) & 0xff) as usize];
    }
    !state
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_bytes_have_the_crc_that_they_have() {
        let bytes: Vec<u8> = (0..100u32).map(|n| (n * 37 + 5) as u8).collect();
        for len in 0..bytes.len() {
            for start in [0, 0x1234_5678, !0] {
                let mut hasher = crc32fast::Hasher::new_with_initial(start);
                hasher.update(&bytes[..len]);
                assert_eq!(update(start, &bytes[..len], 0), hasher.finalize());
                let mut masked = bytes[..len].to_vec();
                if let Some(byte) = masked.get_mut(4) {
                    *byte = 0xff;
                }
                let mut hasher = crc32fast::Hasher::new_with_initial(start);
                hasher.update(&masked);
                assert_eq!(update(start, &bytes[..len], 0xff << 32), hasher.finalize());
            }
        }
    }
}
