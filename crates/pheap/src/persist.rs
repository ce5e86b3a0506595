//! Types that may be stored in a persistent object.
//!
//! A [`Persist`] type has the same meaning in another process and after a restart. It is plain
//! data, it owns memory of the heap it is stored in, or it is composed of such fields:
//!
//! | kind | types |
//! |---|---|
//! | plain data | integers, floats, `bool`, `char`, `()`, `NonZero…`, `Option<NonZero…>` |
//! | arrays | `[T; N]` |
//! | addresses | `*mut T`, `*const T`, [`RelPtr<T>`](crate::pointer::RelPtr): following them is `unsafe` |
//! | owners | [`PBox`], `Option<PBox>`, [`PVec`], [`PString`], [`PBTreeMap`], [`PHashMap`] |
//! | your own | structs and plain enums declared with [`persist!`](crate::persist!) |
//!
//! Not allowed: references, `fn` and `dyn` (they point out of the object); `Vec`, `String`, `Box`
//! and other owners of process memory; tuples and other `Option`s (the compiler chooses their
//! layout, which may change with the next build: use a named struct, or an enum with
//! `#[repr(u8)]`); `Cell`, atomics and locks (a reader's memory is not writable, and the threads
//! that hold a lock do not survive a crash).
//!
//! ```
//! use aquifer_pheap::collections::{PBox, PString};
//!
//! aquifer_pheap::persist! {
//!     /// Without a lifetime: plain data.
//!     #[derive(Debug, Clone, Copy, PartialEq)]
//!     pub struct Point { pub x: f64, pub y: f64 }
//! }
//! aquifer_pheap::persist! {
//!     /// One byte.
//!     #[derive(Debug, Clone, Copy, PartialEq)]
//!     pub enum Colour: u8 { Red = 0, Green = 1, Blue = 2 }
//! }
//! aquifer_pheap::persist! {
//!     /// With the lifetime of the heap: owns memory of it.
//!     pub struct Shape<'h> {
//!         pub name: PString<'h>,
//!         pub colour: Colour,
//!         pub corners: [Point; 3],
//!         pub inside: Option<PBox<'h, Shape<'h>>>,
//!     }
//! }
//! ```
//!
//! A field that is not `Persist` is an error:
//!
//! ```compile_fail
//! aquifer_pheap::persist! { struct Bad { name: String } }
//! ```
//!
//! # Shapes
//! The root stores the [`Shape`] of its type: a hash over the layout of every type reachable from
//! it. A program whose types have changed gets an error when it opens the root, and never reads one
//! type as another. Names are not hashed, so types and fields can be renamed. The root's type id
//! identifies what the fields *mean*.
//!
//! [`PBox`]: crate::collections::PBox
//! [`PVec`]: crate::collections::PVec
//! [`PString`]: crate::collections::PString
//! [`PBTreeMap`]: crate::collections::PBTreeMap
//! [`PHashMap`]: crate::collections::PHashMap

use std::any::TypeId;
use std::marker::PhantomData;
use std::num::{
    NonZeroI8, NonZeroI16, NonZeroI32, NonZeroI64, NonZeroI128, NonZeroIsize, NonZeroU8,
    NonZeroU16, NonZeroU32, NonZeroU64, NonZeroU128, NonZeroUsize,
};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::pointer::RelPtr;

/// A type whose values may be stored in the heap whose scope has the lifetime `'h`.
///
/// See the [module's documentation](mod@crate::persist). Use [`persist!`](crate::persist!);
/// implement it by hand only where the macro cannot.
///
/// # Safety
/// * A value's bytes mean the same in every process that attaches the object, and after every
///   restart: it dereferences no address outside the object, and its layout is defined (`repr(C)`,
///   `repr(u8)`, `repr(transparent)`).
/// * Heap memory that it owns belongs to the heap with the lifetime `'h`.
/// * Shared references to it do not modify the object.
/// * [`Persist::shape`] differs between types whose bytes must not be mistaken for each other, and
///   does not depend on lifetimes. It calls [`Shape::leaf`] or [`Shape::parts`] with the type itself:
///   one that only calls the shape of another type would pass for that type, also where a heap asks
///   whether all stores to its values are recorded.
pub unsafe trait Persist<'h>: Sized {
    /// Adds the type's layout to `shape`.
    fn shape(shape: &mut Shape);
}

/// A hash over the layout of a type and of every type reachable from it.
#[derive(Debug)]
pub struct Shape {
    hash: u64,
    /// Types already added. Types may contain each other through owners, and each is added once.
    /// Identified by `TypeId`, not by name: two types in one function may have the same name.
    told: Vec<TypeId>,
    /// Whether a type holds addresses, or its implementation does not say.
    may_point: bool,
}

impl Shape {
    /// The shape of `T`; never 0.
    pub fn of<'h, T: Persist<'h>>() -> u64 {
        Shape::told_by::<T>().hash()
    }

    pub(crate) fn told_by<'h, T: Persist<'h>>() -> Shape {
        let mut shape = Shape { hash: 0, told: Vec::new(), may_point: false };
        T::shape(&mut shape);
        shape
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash.max(1)
    }

    fn add(&mut self, kind: &str, numbers: [u64; 2]) {
        let mut bytes = kind.as_bytes().to_vec();
        for number in numbers {
            bytes.extend(number.to_le_bytes());
        }
        self.hash = xxh3_64_with_seed(&bytes, self.hash);
    }

    /// Whether values of the type and all they own are stored to through references only, which this
    /// crate's own types and types declared by [`persist!`](crate::persist!) record: it holds no
    /// addresses, and no type with an implementation by hand.
    pub(crate) fn is_recorded(&self) -> bool {
        !self.may_point
    }

    /// Adds a type without parts. Its name is part of the format and must never change.
    pub fn leaf<T>(&mut self, name: &str) {
        self.may_point = true;
        self.own_leaf::<T>(name);
    }

    fn own_leaf<T>(&mut self, name: &str) {
        self.add(name, [size_of::<T>() as u64, align_of::<T>() as u64]);
    }

    /// Adds a type whose parts `tell` adds. The kind's name is part of the format.
    pub fn parts<T>(&mut self, kind: &str, tell: impl FnOnce(&mut Shape)) {
        self.may_point = true;
        self.own_parts::<T>(kind, tell);
    }

    /// [`Shape::parts`] for this crate's types and macros.
    #[doc(hidden)]
    pub fn own_parts<T>(&mut self, kind: &str, tell: impl FnOnce(&mut Shape)) {
        let id = id_but_for_lifetimes::<T>();
        if let Some(index) = self.told.iter().position(|&told| told == id) {
            self.add("told", [index as u64, 0]);
            return;
        }
        self.told.push(id);
        self.own_leaf::<T>(kind);
        tell(self);
        self.add("end", [0, 0]);
    }

    /// Adds the offset of the part that follows, or the value of a variant.
    pub fn at(&mut self, offset: usize) {
        self.add("at", [offset as u64, 0]);
    }
}

/// The type's id, ignoring its lifetimes.
fn id_but_for_lifetimes<T>() -> TypeId {
    trait Identified {
        fn id(&self) -> TypeId
        where
            Self: 'static;
    }
    impl<T> Identified for PhantomData<T> {
        fn id(&self) -> TypeId
        where
            Self: 'static,
        {
            TypeId::of::<T>()
        }
    }
    let nothing = PhantomData::<T>;
    let identified: &dyn Identified = &nothing;
    // SAFETY: only the bound on lifetimes changes. The value is empty and the method returns a
    // number, so nothing outlives a lifetime.
    let identified =
        unsafe { std::mem::transmute::<&dyn Identified, &(dyn Identified + 'static)>(identified) };
    identified.id()
}

macro_rules! leaves {
    ($($type:ty: $name:literal),* $(,)?) => { $(
        // SAFETY: plain data whose layout the language defines.
        unsafe impl<'h> Persist<'h> for $type {
            fn shape(shape: &mut Shape) {
                shape.own_leaf::<$type>($name);
            }
        }
    )* };
}
leaves!(
    u8: "unsigned", u16: "unsigned", u32: "unsigned", u64: "unsigned", u128: "unsigned", usize: "unsigned",
    i8: "signed", i16: "signed", i32: "signed", i64: "signed", i128: "signed", isize: "signed",
    f32: "float", f64: "float", bool: "bool", char: "char", (): "unit",
);

macro_rules! non_zero {
    ($($type:ty),*) => { $(
        // SAFETY: plain data whose layout the language defines.
        unsafe impl<'h> Persist<'h> for $type {
            fn shape(shape: &mut Shape) {
                shape.own_leaf::<$type>("non-zero");
            }
        }
        // SAFETY: the language defines the layout as the number, with 0 for `None`.
        unsafe impl<'h> Persist<'h> for Option<$type> {
            fn shape(shape: &mut Shape) {
                shape.own_leaf::<$type>("optional non-zero");
            }
        }
    )* };
}
non_zero!(
    NonZeroU8,
    NonZeroU16,
    NonZeroU32,
    NonZeroU64,
    NonZeroU128,
    NonZeroUsize,
    NonZeroI8,
    NonZeroI16,
    NonZeroI32,
    NonZeroI64,
    NonZeroI128,
    NonZeroIsize
);

// SAFETY: consecutive elements, each of which is `Persist`.
unsafe impl<'h, T: Persist<'h>, const N: usize> Persist<'h> for [T; N] {
    fn shape(shape: &mut Shape) {
        shape.own_leaf::<Self>("array");
        T::shape(shape);
    }
}

macro_rules! addresses {
    ($($type:ty: $name:literal),*) => { $(
        // SAFETY: an address or an offset; dereferencing it is `unsafe` and the caller's
        // obligation.
        unsafe impl<'h, T: Persist<'h>> Persist<'h> for $type {
            fn shape(shape: &mut Shape) {
                shape.parts::<$type>($name, T::shape);
            }
        }
    )* };
}
addresses!(*mut T: "address", *const T: "address", RelPtr<T>: "relative address");

/// Declares a type that may be stored in an object: a `repr(C)` struct, or an enum without data.
///
/// A struct that owns heap memory takes the heap's lifetime as its only parameter; a plain-data
/// struct takes none. Attributes, `derive`s and visibilities are written as usual. See
/// [`persist`](mod@crate::persist).
#[macro_export]
macro_rules! persist {
    (
        $(#[$meta:meta])*
        $visibility:vis struct $name:ident<$heap:lifetime> {
            $($(#[$field_meta:meta])* $field_visibility:vis $field:ident: $type:ty),* $(,)?
        }
    ) => {
        $(#[$meta])*
        #[repr(C)]
        $visibility struct $name<$heap> {
            $($(#[$field_meta])* $field_visibility $field: $type,)*
        }
        $crate::persist!(@implement $name<$heap>, $heap, $($field: $type,)*);
    };
    (
        $(#[$meta:meta])*
        $visibility:vis struct $name:ident {
            $($(#[$field_meta:meta])* $field_visibility:vis $field:ident: $type:ty),* $(,)?
        }
    ) => {
        $(#[$meta])*
        #[repr(C)]
        $visibility struct $name {
            $($(#[$field_meta])* $field_visibility $field: $type,)*
        }
        $crate::persist!(@implement $name, 'heap, $($field: $type,)*);
    };
    (
        $(#[$meta:meta])*
        $visibility:vis enum $name:ident: $repr:ident {
            $($(#[$variant_meta:meta])* $variant:ident = $value:literal),+ $(,)?
        }
    ) => {
        $(#[$meta])*
        #[repr($repr)]
        $visibility enum $name {
            $($(#[$variant_meta])* $variant = $value,)*
        }
        // SAFETY: a number, valid only for the variants' values; the shape includes those values.
        unsafe impl<'heap> $crate::persist::Persist<'heap> for $name {
            fn shape(shape: &mut $crate::persist::Shape) {
                shape.own_parts::<Self>("enum", |shape| {
                    $(shape.at($name::$variant as usize);)*
                });
            }
        }
    };
    (@implement $type:ty, $heap:lifetime, $($field:ident: $field_type:ty,)*) => {
        // SAFETY: `repr(C)`, and every field is `Persist`: the macro calls each field's `shape`.
        unsafe impl<$heap> $crate::persist::Persist<$heap> for $type {
            fn shape(shape: &mut $crate::persist::Shape) {
                shape.own_parts::<Self>("struct", |shape| {
                    let _ = &shape;
                    $(
                        shape.at(::core::mem::offset_of!(Self, $field));
                        <$field_type as $crate::persist::Persist<$heap>>::shape(shape);
                    )*
                });
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collections::{PBox, PVec};

    persist! { struct Two { first: u32, second: u64 } }
    persist! { struct Renamed { one: u32, other: u64 } }
    persist! { struct Swapped { second: u64, first: u32 } }
    persist! { struct Signed { first: i32, second: u64 } }
    persist! { struct Tree<'h> { here: u64, below: PVec<'h, Tree<'h>> } }
    persist! { struct OtherTree<'h> { here: i64, below: PVec<'h, OtherTree<'h>> } }
    persist! { struct Deep<'h> { inner: PBox<'h, PVec<'h, Two>> } }
    persist! { struct OtherDeep<'h> { inner: PBox<'h, PVec<'h, Signed>> } }
    persist! { enum Small: u8 { One = 1, Two = 2 } }
    persist! { enum More: u8 { One = 1, Two = 2, Three = 3 } }

    #[test]
    fn shapes_tell_layouts_apart_and_not_names() {
        assert_eq!(Shape::of::<Two>(), Shape::of::<Renamed>());
        assert_eq!(Shape::of::<Tree<'_>>(), Shape::of::<Tree<'_>>());
        let shapes = [
            Shape::of::<Two>(),
            Shape::of::<Swapped>(),
            Shape::of::<Signed>(),
            Shape::of::<[Two; 2]>(),
            Shape::of::<[Two; 3]>(),
            Shape::of::<[Signed; 3]>(),
            Shape::of::<Tree<'_>>(),
            Shape::of::<OtherTree<'_>>(),
            Shape::of::<Deep<'_>>(),
            Shape::of::<OtherDeep<'_>>(),
            Shape::of::<Small>(),
            Shape::of::<More>(),
            Shape::of::<*mut Two>(),
            Shape::of::<*mut Signed>(),
            Shape::of::<Option<PBox<'_, u8>>>(),
            Shape::of::<PBox<'_, u8>>(),
            Shape::of::<u64>(),
            Shape::of::<f64>(),
            Shape::of::<NonZeroU64>(),
            Shape::of::<Option<NonZeroU64>>(),
        ];
        let distinct: std::collections::HashSet<_> = shapes.iter().collect();
        assert_eq!(distinct.len(), shapes.len(), "{shapes:x?}");
    }

    /// Otherwise safe Rust could take a number for the address of a box.
    #[test]
    fn types_of_the_same_name_are_told_apart() {
        persist! { struct Part<'h> { number: u64, memory: Option<PBox<'h, u8>> } }
        type First<'h> = Part<'h>;
        {
            persist! { struct Part<'h> { memory: Option<PBox<'h, u8>>, number: u64 } }
            persist! { struct Different<'h> { one: First<'h>, other: Part<'h> } }
            persist! { struct Same<'h> { one: First<'h>, other: First<'h> } }
            assert_eq!(std::any::type_name::<Part<'_>>(), std::any::type_name::<First<'_>>());
            assert_ne!(Shape::of::<Different<'_>>(), Shape::of::<Same<'_>>());
        }
    }

    /// The shape is part of the format: existing objects contain it.
    #[test]
    fn shapes_stay() {
        assert_eq!(Shape::of::<Two>(), 16_771_180_879_657_578_053);
        assert_eq!(Shape::of::<Tree<'_>>(), 6_981_046_541_269_274_920);
    }
}
