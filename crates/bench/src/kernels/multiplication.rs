//! Tiled multiplication of square matrices of integers.
//!
//! A step adds the product of one tile column of the first factor and one tile row of the second to
//! the whole product; bands of the product's columns keep the rows of the second factor in the
//! first-level cache. Threads have equal shares of the product's rows.

use super::{Kernel, Matrix, MatrixShape, Scale, input, vectorised};

/// Columns of the product processed together: 16 rows of 512 integers are 32 KiB.
const BAND_COLUMNS: usize = 512;

/// The kernel.
#[derive(Debug, Clone, Copy)]
pub struct Multiplication {
    order: usize,
    tile: usize,
}

impl Multiplication {
    /// Matrices of `scale.rows` rows and columns, in tiles of `scale.width`.
    pub const fn new(scale: Scale) -> Self {
        Self { order: scale.rows, tile: scale.width }
    }
}

impl Kernel for Multiplication {
    fn matrices(&self) -> Vec<MatrixShape> {
        let factor = MatrixShape { len_bytes: self.order * self.order * 4, changes: false };
        vec![factor, factor, MatrixShape { changes: true, ..factor }]
    }

    unsafe fn initialise(&self, memory: &[*mut u8]) {
        for (&memory, seed) in memory[..2].iter().zip(4..) {
            let matrix = Matrix::<i32>::new(memory, self.order);
            for row in 0..self.order {
                // SAFETY: a row of the matrix, which only this call accesses.
                let values = unsafe { matrix.row_mut(row) };
                for (column, value) in values.iter_mut().enumerate() {
                    *value = input(seed, row, column);
                }
            }
        }
        let product = Matrix::<i32>::new(memory[2], self.order);
        for row in 0..self.order {
            // SAFETY: as above.
            unsafe { product.row_mut(row) }.fill(0);
        }
    }

    fn steps(&self, _threads: usize) -> usize {
        self.order.div_ceil(self.tile)
    }

    unsafe fn step(&self, memory: &[*mut u8], step: usize, thread: usize, threads: usize) {
        let first = Matrix::<i32>::new(memory[0], self.order);
        let second = Matrix::<i32>::new(memory[1], self.order);
        let product = Matrix::<i32>::new(memory[2], self.order);
        let inner = step * self.tile..((step + 1) * self.tile).min(self.order);
        let rows = self.order * thread / threads..self.order * (thread + 1) / threads;
        for from in (0..self.order).step_by(BAND_COLUMNS) {
            let columns = from..(from + BAND_COLUMNS).min(self.order);
            for row in rows.clone() {
                // SAFETY: in this step only this thread accesses these rows.
                let sums = unsafe { product.row_mut(row) };
                // SAFETY: no thread stores to the factors.
                let factors = unsafe { first.row(row) };
                for k in inner.clone() {
                    // SAFETY: as above.
                    let values = unsafe { second.row(k) };
                    add_scaled(&mut sums[columns.clone()], &values[columns.clone()], factors[k]);
                }
            }
        }
    }
}

vectorised! {
    /// `sums += factor * values`.
    fn add_scaled(sums: &mut [i32], values: &[i32], factor: i32) {
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum = sum.wrapping_add(factor.wrapping_mul(*value));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::tests::run;

    #[test]
    fn it_is_the_sum_of_products() {
        for (order, tile) in [(20, 16), (33, 4)] {
            let kernel = Multiplication::new(Scale { rows: order, columns: order, width: tile });
            let matrices = run(&kernel, 2);
            let product: Vec<i32> =
                matrices[2].iter().flat_map(|&word| [word as i32, (word >> 32) as i32]).collect();
            for row in 0..order {
                for column in 0..order {
                    let sum = (0..order).fold(0_i32, |sum, k| {
                        sum.wrapping_add(input(4, row, k).wrapping_mul(input(5, k, column)))
                    });
                    assert_eq!(product[row * order + column], sum, "{row}, {column}");
                }
            }
        }
    }
}
